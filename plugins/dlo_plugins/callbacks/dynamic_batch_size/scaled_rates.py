"""Scaling of learning rates for a single optimizer step."""

from __future__ import annotations

from torch.optim import Optimizer

_UNSCALED = "dlo_unscaled_lr"


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiplies the rates of an optimizer's groups, and stores the old ones in the groups."""
    if factor != 1.0:
        for group in optimizer.param_groups:
            group[_UNSCALED] = group["lr"]
            group["lr"] = group["lr"] * factor


def restore_rates(optimizer: Optimizer) -> None:
    """Restores the rates from before :func:`scale_rates`, if it was called."""
    for group in optimizer.param_groups:
        if _UNSCALED in group:
            group["lr"] = group.pop(_UNSCALED)
