"""Learning rates that are scaled for one optimizer step, and come back after it."""

from __future__ import annotations

from torch.optim import Optimizer

_UNSCALED = "dlo_unscaled_lr"


def scale_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiplies the rates of an optimizer's groups, which remember them."""
    if factor != 1.0:
        for group in optimizer.param_groups:
            group[_UNSCALED] = group["lr"]
            group["lr"] = group["lr"] * factor


def restore_rates(optimizer: Optimizer) -> None:
    """Gives the groups the rates back that :func:`scale_rates` has found, if it has."""
    for group in optimizer.param_groups:
        if _UNSCALED in group:
            group["lr"] = group.pop(_UNSCALED)
