"""The group over which callbacks agree: on the CPU, beside whatever the strategy sends."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from dlo_framework.contract import contract_of

_GROUPS: weakref.WeakKeyDictionary[Strategy, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def control_group(trainer: Trainer) -> dist.ProcessGroup | None:
    """Returns a gloo group of all ranks, one a strategy; None for a single process.

    Not the default group: gradients are reduced on that one from other threads, so that what callbacks send could meet
    what another rank's backward sends.

    Called on all ranks at the same point for the first time. Whoever uses it does so on all ranks in the same order.
    """
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return None
    group = _GROUPS.get(trainer.strategy)
    if group is None:
        made: Any = dist.new_group(backend="gloo", timeout=contract_of(trainer.strategy).collective_timeout)
        assert isinstance(made, dist.ProcessGroup)
        group = _GROUPS[trainer.strategy] = made
    return group
