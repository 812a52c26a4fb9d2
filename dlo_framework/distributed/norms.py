"""The norm of a gradient, of which this rank may hold a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def total_norm(optimizer: Optimizer) -> Tensor:
    """Returns the 2-norm of the gradients that an optimizer holds on this rank; DTensors' over their mesh."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def divides_state(strategy: Any) -> bool:
    """Returns whether a strategy of dlo's leaves each rank a part only of gradients or parameters."""
    return getattr(strategy, "zero_stage", 0) > 0


def gradient_norm(strategy: Any, optimizer: Optimizer) -> Tensor:
    """Returns the 2-norm of an optimizer's whole gradient under a strategy; called on all ranks.

    A strategy that divides gradients among ranks knows how to put the norm together; for any other, the gradients
    that a rank holds are all there are.
    """
    of_strategy = getattr(strategy, "gradient_norm", None)
    return of_strategy(optimizer) if of_strategy is not None else total_norm(optimizer)
