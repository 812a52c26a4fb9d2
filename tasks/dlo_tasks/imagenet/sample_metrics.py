"""Metrics that are exact across ranks and partial batches, at the cost of a few sums per batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class SampleMean(Metric):
    """Mean of one value per sample, over all samples of all ranks.

    Ranks add their sums and counts and divide once, so the result does not depend on how samples are distributed over
    batches and ranks. Counts of hits are integers below 2**24, so an accuracy is exact to the last bit.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, values: Tensor, real: Tensor) -> None:
        """Adds the values, `[B]`, of the samples for which `real`, `[B]` of bool, is true."""
        self.total += torch.where(real, values, 0).sum(dtype=torch.float32)
        self.count += real.sum()

    def compute(self) -> Tensor:
        """Returns the mean as a float32 scalar; NaN if there were no samples."""
        return self.total / self.count


class Confusion(Metric):
    """Counts of (true class, predicted class) pairs over all ranks, `[C, C]` of int64.

    Equals torchmetrics' `MulticlassConfusionMatrix`, whose update costs O(C * C) per batch where this costs O(B): with
    1,000 classes this one is cheap enough to stay on.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("counts", torch.zeros(num_classes**2, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, targets: Tensor, real: Tensor) -> None:
        """Adds pairs of class indices, `[B]` each, where `real`, `[B]` of bool, is true."""
        cells = torch.where(real, targets * self.num_classes + predicted, 0)
        self.counts.index_add_(0, cells, real.long())

    def compute(self) -> Tensor:
        """Returns the counts, rows by true class."""
        return self.counts.view(self.num_classes, self.num_classes)
