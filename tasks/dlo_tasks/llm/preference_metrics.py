"""Metrics of preference tuning: exact means over the pairs, or completions, of all batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from dlo_tasks.llm.evaluation import sum_dtype
from dlo_tasks.llm.preference_losses import kto_divergence, kto_losses


class CombinedMeans(Metric):
    """Sum or difference of two means, each of its own number of values.

    Args:
        signs: Sign of each mean.
    """

    full_state_update = False
    totals: Tensor
    counts: Tensor

    def __init__(self, signs: tuple[int, int]) -> None:
        super().__init__()
        self._signs = signs
        self.add_state("totals", torch.zeros(2, dtype=sum_dtype()), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(2, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, totals: Tensor, counts: Tensor) -> None:
        """Adds a batch.

        Args:
            totals: Sums of the values, `[2]`.
            counts: Numbers of the values, `[2]`.
        """
        self.totals += totals
        self.counts += counts

    def compute(self) -> Tensor:
        """Returns the combined means, a float32 scalar; NaN without values of one."""
        first, second = self.totals / self.counts
        return (self._signs[0] * first + self._signs[1] * second).float()


class KTOLoss(Metric):
    """Mean loss of KTO, with the divergence of all batches, so that it does not depend on the batch size.

    Args:
        beta: Weight of the divergence from the reference.
        weights: Weights of desirable and of undesirable completions.
    """

    full_state_update = False
    ratios: list[Tensor]
    desirable: list[Tensor]
    total: Tensor
    count: Tensor

    def __init__(self, beta: float, weights: tuple[float, float]) -> None:
        super().__init__()
        self._beta, self._weights = beta, weights
        self.add_state("ratios", [], dist_reduce_fx="cat")
        self.add_state("desirable", [], dist_reduce_fx="cat")
        self.add_state("total", torch.tensor(0.0, dtype=sum_dtype()), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, ratios: Tensor, desirable: Tensor, total: Tensor, count: Tensor) -> None:
        """Adds a batch.

        Args:
            ratios: Log-ratios of the completions, `[C]`.
            desirable: Whether each is desirable, bool `[C]`.
            total: Sum of the log-ratios of mismatched completions.
            count: Number of them.
        """
        self.ratios.append(ratios)
        self.desirable.append(desirable)
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        """Returns the mean loss, a float32 scalar."""
        ratios, desirable = (
            torch.cat(values) if isinstance(values, list) else values for values in (self.ratios, self.desirable)
        )
        divergence = kto_divergence(self.total, self.count).to(ratios.dtype)
        return kto_losses(ratios, desirable.bool(), divergence, self._beta, self._weights).mean().float()
