"""Fully sharded data parallelism as a Lightning strategy, on torch's FSDP2.

PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel. Zhao et al., 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch.strategies import FSDPStrategy as LightningFSDP

from dlo_framework.mesh import MeshSpec
from dlo_plugins.appliers.fully_shard import FullyShard
from dlo_plugins.fsdp.mesh import mesh_sizes
from dlo_plugins.strategies.mesh import MeshStrategy


class FSDPStrategy(MeshStrategy):
    """Divides parameters, gradients and optimizer state among the ranks, unit by unit, with torch's FSDP2.

    A unit's parameters are gathered before its forward and its backward, and freed after; its gradients are summed
    and divided again in backward. With psi parameters in single precision under Adam, each of N ranks holds 16 psi / N
    bytes and what one unit, two with prefetch, needs in whole; a step passes 3 psi elements, 2 psi with
    `reshard_after_forward: false`.

    Aliases: `fsdp`; `hsdp` (a copy of the model on each node); `fsdp_offload`.

    Args:
        replicate: copies of the model, each divided among `shard` ranks (hybrid sharding, HSDP); -1 for as many as
            there are ranks for.
        shard: ranks that share one copy; -1 for all that are left, `node` for those of a node, so that gathers stay
            inside it.
        units: names of the modules that are gathered as one, patterns such as `model.blocks.*` too; by default the
            model's blocks, or, where there are none, submodules of at most a sixteenth of the parameters.
        reshard_after_forward: whether units are freed between forward and backward: false saves the second gather and
            holds the whole model; a number keeps them divided over so many ranks (of a node, say) until backward. By
            default all are freed but what lies outside the units, which backward needs first.
        param_dtype: what parameters are gathered and computed in: `bfloat16` halves what passes; `float16`. By
            default `bfloat16` on accelerators under `bf16-mixed`, for models without batch norm; else `float32`,
            their own, so that losses are those of a single process at the Trainer's precision.
        reduce_dtype: what gradients are summed in; by default the parameters' own dtype.
        output_dtype: what a unit's floating-point outputs are cast to; by default they are left as they are.
        offload: whether shards and optimizer state live in CPU memory, and the CPU steps.
        meta_init: whether `configure_model` builds the model without memory, which each unit gets as it is sharded:
            for models larger than one device's memory. Each module's `reset_parameters` then initialises it, alike
            on any number of ranks; a model without these needs a checkpoint to start from.
        recompute: whether units keep their inputs alone for backward, and compute the rest again.
        forward_prefetch: units gathered ahead in forward beyond the one that runs; 0 leaves it to FSDP, which overlaps
            one on an accelerator.
        backward_prefetch: likewise in backward; by default FSDP's own, one.
        find_unused: whether parameters may go without a gradient in a step. Otherwise that is an error that names them.
        sync_every_micro_batch: whether gradients are divided after each micro-batch of an accumulation. By default
            each rank adds up whole gradients until the last one: no communication, 4 psi bytes.
        timeout_minutes: how long a collective may take before a rank gives the others up.

    Raises:
        DloError: if options contradict each other, or do not fit the ranks or the model.
    """

    allow_unused = "set find_unused: true in the strategy"

    def __init__(
        self,
        replicate: int = 1,
        shard: int | Literal["node"] = -1,
        units: list[str] | None = None,
        reshard_after_forward: bool | int | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        output_dtype: str | None = None,
        offload: bool = False,
        meta_init: bool = False,
        recompute: bool = False,
        forward_prefetch: int = 0,
        backward_prefetch: int | None = None,
        find_unused: bool = False,
        sync_every_micro_batch: bool = False,
        timeout_minutes: float = 10.0,
    ) -> None:
        sharding = FullyShard(
            units=units,
            reshard_after_forward=reshard_after_forward,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            output_dtype=output_dtype,
            offload=offload,
            recompute=recompute,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            find_unused=find_unused,
            sync_every_micro_batch=sync_every_micro_batch,
        )
        super().__init__(appliers=[sharding], meta_init=meta_init, timeout_minutes=timeout_minutes)
        self.axes = (replicate, shard)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes the short names known: ``--trainer.strategy fsdp``, which Lightning has for a strategy of its own."""
        _take_name("fsdp")
        for name, arguments in (
            ("fsdp", {}),
            ("hsdp", {"replicate": -1, "shard": "node"}),
            ("fsdp_offload", {"offload": True}),
        ):
            strategy_registry.register(name, cls, description=f"FSDP2: {arguments}", override=True, **arguments)

    def _mesh_sizes(self) -> tuple[int, int]:
        replicate, shard = self.axes
        ranks = self.num_processes if shard == "node" else shard
        return mesh_sizes(replicate, ranks, self.num_nodes * self.num_processes)

    def mesh_spec(self) -> MeshSpec:
        """Returns the mesh of this run: copies, and the ranks that share each."""
        replicate, shard = self._mesh_sizes()
        return MeshSpec(dp_replicate=replicate, dp_shard=shard)


def _take_name(name: str) -> None:
    """Takes a name from Lightning's FSDPStrategy: the Trainer (2.6) refuses the names in its list without a GPU."""
    theirs = LightningFSDP._registered_strategies
    if name in theirs:
        theirs.remove(name)
