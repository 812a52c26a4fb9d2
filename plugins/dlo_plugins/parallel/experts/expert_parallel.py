"""Implements expert parallelism as an applier: each rank of `ep` gets some of the experts of each mixture.

GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding. Lepikhin et al., 2020,
arXiv 2006.16668. Departures: see :mod:`dlo_plugins.parallel.experts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlo_framework.applier import Applier, Phase

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from dlo_framework.plan import ParallelPlan
    from dlo_plugins.parallel.experts.local_experts import TokenExchange

AXIS = "ep"


class ExpertParallel(Applier):
    """Divides the experts of each mixture over the ranks of `ep`, to which tokens travel and from which they return.

    The stacked parameters of the experts are replaced by this rank's slices, which
    :func:`dlo_framework.shards.get_layout` describes. Routers and shared experts stay on each rank.

    Attributes:
        exchanges: Exchange of tokens of each mixture, by the name of its experts; empty before :meth:`apply`.
    """

    phase = Phase.EXPERTS
    axis = AXIS

    def __init__(self) -> None:
        self.exchanges: dict[str, TokenExchange] = {}

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Divides a model's experts in place; it may be on the meta device.

        Args:
            module: Full model, the same on each rank of the axis.
            mesh: Mesh with an axis `ep`.
            plan: Plan of the model, with names relative to it.

        Raises:
            DloError: The ranks cannot share the experts.
        """
        self._divide(module, mesh[AXIS].get_group(), plan)

    def apply_to_run(self, run: Any) -> None:
        """Divides the experts of a run's model; `ep` divides the ranks of two axes of its mesh."""
        self._divide(run.model, run.groups.expert_group, run.plan)

    def _divide(self, module: nn.Module, group: Any, plan: ParallelPlan) -> None:
        from dlo_plugins.parallel.experts.local_experts import divide_experts, divisible_mixtures

        found = divisible_mixtures(module, plan, group.size())
        self.exchanges = {mixture.experts: divide_experts(module, mixture, group) for mixture in found}

    def check(self, module: nn.Module, plan: ParallelPlan, ep: int) -> None:
        """Checks that ranks can share a model's experts, before any process starts.

        Args:
            module: Model, which may be on the meta device; it is not changed.
            plan: Plan of the model.
            ep: Number of ranks of the axis.

        Raises:
            DloError: They cannot; the message computes the nearest size that works.
        """
        from dlo_plugins.parallel.experts.local_experts import divisible_mixtures

        if ep > 1:
            divisible_mixtures(module, plan, ep)
