"""A rank's shard of one pruned weight: its mask, and where its elements are in the full weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_framework.shards import Box, Shard, held_boxes


@dataclass
class PrunedShard:
    """This rank's shard of a pruned weight.

    Attributes:
        name: Name of the weight.
        tensor: Tensor that the optimizer steps.
        shape: Shape of the full weight.
        input_dim: Dimension of the input features.
        offset: Index in the model of the weight's first element.
        number: Number of the weight among all pruned ones.
        make: Function that returns elements in this layout as a shard.
        boxes: Boxes of the full weight that this rank holds.
        owned: Whether this rank counts each of the boxes.
        pruned: Whether each element is pruned, bool in the local layout.
        dense: Values of pruned elements that can return, zero elsewhere; None where pruned elements stay zero.
        scores: Accumulated scores of movement pruning; None for other methods.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    input_dim: int
    offset: int
    number: int
    make: Callable[[Tensor], Shard]
    boxes: list[Box]
    owned: list[bool]
    pruned: Tensor
    dense: Tensor | None = None
    scores: Tensor | None = None

    def views(self, values: Tensor, *, owned: bool = False) -> list[tuple[Box, Tensor]]:
        """Returns the boxes with their elements of a tensor in the local layout; with ``owned``, those counted here."""
        found = held_boxes(self.make(values))
        return [pair for pair, own in zip(found, self.owned, strict=True) if own] if owned else found

    def indices(self, box: Box) -> Tensor:
        """Returns the indices in the model of a box's elements, int64 in its shape."""
        return self.offset + box_indices(box, self.shape)


def box_indices(box: Box, shape: Sequence[int]) -> Tensor:
    """Returns the indices in a row-major tensor of a box's elements, int64 in the box's shape."""
    found = torch.zeros((), dtype=torch.int64)
    stride = 1
    for dim in range(len(shape) - 1, -1, -1):
        along = (torch.arange(box.sizes[dim]) + box.offsets[dim]) * stride
        found = found + along.view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return found
