"""Base class of appliers, each of which rewrites a module in place before training for one technique.

A strategy sorts the appliers of a run by phase, so their one valid order (tensor parallel, experts, context parallel,
pipeline stages, recomputation, compile, shard) is defined in this file alone.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from dlo_framework.plan import ParallelPlan


class Phase(enum.IntEnum):
    """Phase of an applier; phases run in ascending order."""

    TENSOR = 10
    EXPERTS = 12
    CONTEXT = 20
    STAGES = 25
    CHECKPOINT = 30
    COMPILE = 40
    SHARD = 50


class Applier(ABC):
    """Rewrites a module in place. Subclasses set :attr:`phase` and implement :meth:`apply`."""

    phase: ClassVar[Phase]
    #: Axis of the mesh along which it works; a run with one rank of the axis leaves it out. None for every mesh.
    axis: ClassVar[str | None] = None
    #: Whether it needs the model's plan, which only a task has.
    needs_plan: ClassVar[bool] = True

    @abstractmethod
    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Rewrites ``module`` in place for ``mesh``, and splits it only where ``plan`` allows.

        Raises:
            DloError: if the module cannot be split so; the message computes the nearest size that works.
        """

    def apply_to_run(self, run: Any) -> None:
        """Rewrites the module of a run; by default by :meth:`apply`.

        Args:
            run: Strategy's record of the run, with at least its ``model``, its ``mesh`` and the model's ``plan``.
        """
        self.apply(run.model, run.mesh, run.plan)
