"""Gradient norms, also of gradients that are sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlo_framework.strategy_contract import contract_of

#: Most elements whose squares are added up one after the other.
_ROW = 1 << 14


def total_norm(optimizer: Optimizer) -> Tensor:
    """Returns the 2-norm of an optimizer's gradients on this rank; for DTensors, over their mesh."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in stepped if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=stepped[0].device if stepped else None)
    norm = torch.nn.utils.get_total_norm([part for gradient in gradients for part in split_for_norm(gradient)])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def split_for_norm(gradient: Tensor) -> list[Tensor]:
    """Returns tensors with the same joint 2-norm as a gradient, for which torch computes it precisely.

    torch (2.11 to 2.15) adds up a CPU tensor's squares in the order of its elements: for 16 million elements in single
    precision the norm is off by 6e-4. So the norms of rows are computed first, and then their norm, in the same time.
    """
    rows = gradient.numel() // _ROW
    if rows < 2 or isinstance(gradient, DTensor) or gradient.device.type != "cpu" or not gradient.is_contiguous():
        return [gradient]
    flat = gradient.view(-1)
    return [torch.linalg.vector_norm(flat[: rows * _ROW].view(rows, _ROW), dim=1), flat[rows * _ROW :]]


def shards_state(strategy: Any) -> bool:
    """Returns whether a strategy of dlo shards optimizer state, gradients or parameters."""
    return (contract_of(strategy).zero_stage or 0) > 0


def gradient_norm(strategy: Any, optimizer: Optimizer) -> Tensor:
    """Returns the 2-norm of an optimizer's full gradient under a strategy; called on all ranks.

    A strategy that shards gradients has a method for it; under any other, a rank has the full gradients.
    """
    of_strategy = contract_of(strategy).gradient_norm(optimizer)
    return total_norm(optimizer) if of_strategy is None else of_strategy
