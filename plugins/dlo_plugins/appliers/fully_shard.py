"""Fully sharded data parallelism of a model's blocks and what lies around them, on torch's FSDP2.

PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel. Zhao et al., 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from dlo_framework.applier import Applier, Phase
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.fsdp.policy import mixed_precision
from dlo_plugins.fsdp.sharding import ShardOptions


class FullyShard(Applier):
    """Says how parameters, gradients and optimizer state are divided among the ranks that share a copy of a model.

    In a config it replaces MeshStrategy's own: `appliers: [{class_path: FullyShard, init_args: {offload: true}}]`.

    Args:
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
        recompute: whether units keep their inputs alone for backward, and compute the rest again.
        forward_prefetch: units gathered ahead in forward beyond the one that runs; 0 leaves it to FSDP, which overlaps
            one on an accelerator.
        backward_prefetch: likewise in backward; by default FSDP's own, one.
        find_unused: whether parameters may go without a gradient in a step. Otherwise that is an error that names them.
        sync_every_micro_batch: whether gradients are divided after each micro-batch of an accumulation. By default
            each rank adds up whole gradients until the last one: no communication, 4 psi bytes.

    Raises:
        DloError: if options contradict each other.
    """

    phase: ClassVar[Phase] = Phase.SHARD

    def __init__(
        self,
        units: list[str] | None = None,
        reshard_after_forward: bool | int | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        output_dtype: str | None = None,
        offload: bool = False,
        recompute: bool = False,
        forward_prefetch: int = 0,
        backward_prefetch: int | None = None,
        find_unused: bool = False,
        sync_every_micro_batch: bool = False,
    ) -> None:
        for name, depth in (("forward_prefetch", forward_prefetch), ("backward_prefetch", backward_prefetch)):
            if depth is not None and depth < 0:
                raise DloError(f"{name} is a number of units, at least 0, but was {depth}")
        self.units, self.reshard_after_forward, self.offload = units, reshard_after_forward, offload
        self.dtypes = (param_dtype, reduce_dtype, output_dtype)
        self.recompute, self.prefetch = recompute, (forward_prefetch, backward_prefetch)
        self.find_unused, self.sync_every_micro_batch = find_unused, sync_every_micro_batch

    def options(self, precision: str, whole_steps: bool, param_dtype: str | None = None) -> ShardOptions:
        """Returns what a strategy shards by.

        Args:
            precision: the Trainer's.
            whole_steps: see :class:`~dlo_plugins.fsdp.sharding.ShardOptions`.
            param_dtype: what parameters are gathered in where the user has not said.

        Raises:
            DloError: if the dtypes do not go with the precision.
        """
        return ShardOptions(
            policy=mixed_precision(precision, self.dtypes[0] or param_dtype, *self.dtypes[1:]),
            reshard_after_forward=self.reshard_after_forward,
            offload=self.offload,
            recompute=self.recompute,
            forward_prefetch=self.prefetch[0],
            backward_prefetch=self.prefetch[1],
            whole_steps=whole_steps,
        )

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Shards a model's blocks and then the rest, over an axis `dp_shard` and, if there is one, `dp_replicate`.

        For strategies of your own; dlo's own shard by :meth:`options`, with their task's steps as the root.
        """
        names = [axis for axis in ("dp_replicate", "dp_shard") if axis in (mesh.mesh_dim_names or ())]
        policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if self.offload else OffloadPolicy()
        options: dict[str, Any] = {
            "mesh": mesh[tuple(names)] if names else mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": mixed_precision("32-true", *self.dtypes),
            "offload_policy": policy,
        }
        for name in plan.block_names(module):
            fully_shard(module.get_submodule(name), **options)
        fully_shard(module, **options)
