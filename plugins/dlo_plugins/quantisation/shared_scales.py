"""Scales of slices under tensor parallelism: the largest value of a factor is that of the full one.

A layer's weight `[N, K]` is sliced along N (column projection) or K (row projection). Along N the gradient of the
output is sliced too, along K the input. A scale of a full factor needs the maximum over the ranks if the factor is
sliced, a scale per row only if the rows are: in the product that sums over the sliced dim. Then tensor parallelism
rounds as one process does.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

#: Role of a factor in the products of a linear layer.
Role = Literal["input", "weight", "gradient"]
#: Sliced dim of a weight `[N, K]`; None for a full weight.
SlicedDim = Literal[0, 1] | None
_SLICED: dict[int, tuple[Role, Role]] = {0: ("gradient", "weight"), 1: ("input", "weight")}
_OPS = torch.ops._c10d_functional


def shares_maximum(roles: tuple[Role, Role], role: Role, sliced: SlicedDim, rowwise: bool) -> bool:
    """Returns whether a factor's scales need the maximum over the ranks of tensor parallelism.

    Args:
        roles: Roles of both factors of the product.
        role: Role of the factor.
        sliced: Sliced dim of the layer's weight.
        rowwise: Whether each row of a factor has a scale, in place of one for the full factor.
    """
    if sliced is None:
        return False
    return set(roles) == set(_SLICED[sliced]) if rowwise else role in _SLICED[sliced]


def maximum(values: Tensor, group: str) -> Tensor:
    """Returns the elementwise maximum over the ranks of a process group, by its name; traced by torch.compile."""
    found: Tensor = _OPS.wait_tensor(_OPS.all_reduce(values.contiguous(), "max", group))
    return found
