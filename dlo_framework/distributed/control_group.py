"""Control group: a gloo group over which callbacks communicate, apart from the strategy's own groups."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

_GROUPS: weakref.WeakKeyDictionary[Strategy, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def control_group(trainer: Trainer) -> dist.ProcessGroup | None:
    """Returns a gloo group of all ranks, one for each strategy; None for a single process.

    It is not the default group, on which other threads reduce gradients: a callback's collectives could pair with
    those of another rank's backward.

    The first call must come at the same point on all ranks, and all ranks must use the group in the same order.
    """
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    group = _GROUPS.get(trainer.strategy)
    if group is None:
        timeout = getattr(trainer.strategy, "_timeout", None)  # Lightning's name for it (2.6).
        made: Any = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(made, dist.ProcessGroup)
        group = _GROUPS[trainer.strategy] = made
    return group
