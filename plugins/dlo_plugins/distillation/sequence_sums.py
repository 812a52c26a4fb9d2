"""Sums over the ranks that share sequences, for losses of which each rank computes a part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(values: Tensor, group: Any) -> Tensor:
    """Returns the sum of a tensor over ranks; backward sums the gradients, because each rank's loss depends on the sum.

    Args:
        values: Tensor of the same shape on all ranks.
        group: Process group of the ranks; None for one rank.
    """
    if group is None:
        return values
    found: Tensor = _SumOverRanks.apply(values, group)
    return found


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
