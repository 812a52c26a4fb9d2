"""Appliers: one small class a technique that rewrites a module in place before training.

A strategy sorts the appliers of a run by phase, so the one order that is right (tensor parallel, context
parallel, recomputation, compile, shard) stands in this file and nowhere else.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from dlo_framework.plan import ParallelPlan


class Phase(enum.IntEnum):
    """When an applier runs, in ascending order."""

    TENSOR = 10
    CONTEXT = 20
    CHECKPOINT = 30
    COMPILE = 40
    SHARD = 50


class Applier(ABC):
    """Rewrites a module in place. Subclasses set :attr:`phase` and implement :meth:`apply`."""

    phase: ClassVar[Phase]

    @abstractmethod
    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Rewrites ``module`` in place for ``mesh``, cutting it only where ``plan`` allows.

        Raises:
            DloError: if the module cannot be cut so; the message computes the nearest size that works.
        """
