"""Implements fully sharded data parallelism as a Lightning strategy, on torch's FSDP2.

PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel. Zhao et al., 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.strategies import FSDPStrategy as LightningFSDP

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.gathered_dtype import Bf16Weights
from dlo_plugins.parallel.mesh.strategy import MeshStrategy


class FSDPStrategy(MeshStrategy):
    """Shards parameters, gradients and optimizer state over the ranks, unit by unit, with torch's FSDP2.

    A unit's parameters are all-gathered before its forward and its backward, and freed after each; its gradients are
    reduce-scattered in backward. With psi parameters in single precision under Adam, each of N ranks holds 16 psi / N
    bytes and the full parameters of one unit, of two with prefetch. A step communicates 3 psi elements, 2 psi with
    `reshard_after_forward: false`.

    Aliases: `fsdp`; `hsdp` (a copy of the model on each node); `fsdp_offload`.

    Args:
        replicate: Number of copies of the model, each sharded over `shard` ranks (hybrid sharding, HSDP); -1 for all
            remaining ranks.
        shard: Number of ranks that share one copy; -1 for all remaining ranks, `node` for those of a node, so that
            all-gathers stay inside it.
        meta_init: Whether `configure_model` builds the model on the meta device, and each unit is allocated when it
            is sharded: for models larger than one device's memory. Each module's `reset_parameters` then initialises
            it, alike on any number of ranks; a model without these needs a checkpoint to start from.
        bf16_weights: Kind of bf16 weights: `masters` has sharded master weights in single precision, `stochastic` has
            none, and rounds each optimizer's step stochastically. By default weights have the precision's dtype.
        timeout_minutes: Timeout of a collective in minutes, after which a rank aborts the run.
        **options: Options of :class:`~dlo_plugins.parallel.fsdp.fully_shard.FullyShard`, such as `units` and `offload`.

    Raises:
        DloError: Options contradict each other, or do not fit the ranks or the model.
    """

    allow_unused = "set find_unused: true in the strategy"

    def __init__(
        self,
        replicate: int = 1,
        shard: int | Literal["node"] = -1,
        meta_init: bool = False,
        bf16_weights: Bf16Weights | None = None,
        timeout_minutes: float = 10.0,
        **options: Any,
    ) -> None:
        sharding = FullyShard(**options)
        super().__init__(
            appliers=[sharding], meta_init=meta_init, bf16_weights=bf16_weights, timeout_minutes=timeout_minutes
        )
        self.axes = (replicate, shard)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the short names: ``--trainer.strategy fsdp``, which is also Lightning's FSDPStrategy."""
        _take_name("fsdp")
        for name, arguments in (
            ("fsdp", {}),
            ("hsdp", {"replicate": -1, "shard": "node"}),
            ("fsdp_offload", {"offload": True}),
        ):
            strategy_registry.register(name, cls, description=f"FSDP2: {arguments}", override=True, **arguments)

    def mesh_spec(self) -> MeshSpec:
        """Returns the mesh of this run, of copies and shards."""
        replicate, shard = self.axes
        ranks = self.num_processes if shard == "node" else shard
        try:
            return MeshSpec(dp_replicate=replicate, dp_shard=ranks).resolve(self.num_nodes * self.num_processes)
        except DloError as error:  # The options have the axes' names without their prefix.
            raise DloError(str(error).replace("dp_", "")) from None


def _take_name(name: str) -> None:
    """Removes a name from Lightning's FSDPStrategy, whose names the Trainer (2.6) refuses without a GPU."""
    theirs = LightningFSDP._registered_strategies
    if name in theirs:
        theirs.remove(name)
