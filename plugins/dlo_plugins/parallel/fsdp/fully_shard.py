"""Implements fully sharded data parallelism as an applier, on torch's FSDP2.

PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel. Zhao et al., 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from dlo_framework.distributed.model_units import find_units
from dlo_framework.errors import check_number
from dlo_framework.mesh import MeshSpec
from dlo_framework.plan import Applier, ParallelPlan, Phase
from dlo_framework.strategy_abilities import HalfPrecisionGradients
from dlo_plugins.parallel.fsdp.precision_policy import mixed_precision
from dlo_plugins.parallel.fsdp.sharding import ShardedModule, ShardOptions, match_units
from dlo_plugins.parallel.gathered_dtype import check_sent_dtype, default_param_dtype


class FullyShard(Applier, HalfPrecisionGradients):
    """Shards parameters, gradients and optimizer state over the ranks that share a copy of a model.

    In a config it replaces MeshStrategy's own: `appliers: [{class_path: FullyShard, init_args: {offload: true}}]`.

    Args:
        units: Names of the modules that are gathered together, or patterns such as `model.blocks.*`; by default the
            model's blocks, or, where there are none, submodules of at most a sixteenth of the parameters.
        reshard_after_forward: Whether units are freed between forward and backward: false saves the second all-gather
            and keeps the full model; a number keeps them sharded over that number of ranks (such as those of a node)
            until backward. By default all are freed except parameters outside the units, which backward needs first.
        param_dtype: Dtype in which parameters are gathered and computed: `bfloat16` halves the all-gathers; `float16`.
            By default `bfloat16` on accelerators under `bf16-mixed`, for models without batch norm; else `float32`,
            their own, so that losses are those of a single process at the Trainer's precision.
        reduce_dtype: Dtype in which gradients are summed; by default the parameters' own.
        output_dtype: Dtype to which a unit's floating-point outputs are cast; by default they are not cast.
        offload: Whether shards and optimizer state are in CPU memory, and the CPU steps.
        recompute: Whether units keep only their inputs for backward, and recompute the rest.
        forward_prefetch: Number of units that are gathered ahead in forward; 0 for FSDP's default, which overlaps one
            on an accelerator. A pipeline gathers at least one ahead.
        backward_prefetch: Number of units that are gathered ahead in backward; by default FSDP's own, one.
        find_unused: Whether parameters may have no gradient in a step. Otherwise that is an error that names them.
        sync_every_micro_batch: Whether gradients are reduce-scattered after each micro-batch of an accumulation. By
            default each rank accumulates full gradients until the last one: no communication, 4 psi bytes.

    Raises:
        DloError: Options contradict each other.
    """

    phase: ClassVar[Phase] = Phase.SHARD
    needs_plan: ClassVar[bool] = False

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
            check_number(name, depth, "a number of units of at least 0", "use 0 or leave it out")
        self.units, self.reshard_after_forward, self.offload = units, reshard_after_forward, offload
        self.dtypes = (param_dtype, reduce_dtype, output_dtype)
        self.recompute, self.prefetch = recompute, (forward_prefetch, backward_prefetch)
        self.find_unused, self.sync_every_micro_batch = find_unused, sync_every_micro_batch

    def options(
        self,
        precision: str,
        spec: MeshSpec,
        device: torch.device,
        module: nn.Module | None,
        whole_steps: bool = True,
        param_dtype: str | None = None,
    ) -> ShardOptions:
        """Returns the options of the sharding on a mesh.

        Args:
            precision: Precision of the Trainer.
            spec: Mesh.
            device: Device on which this rank computes.
            module: Module that is sharded; None before it is known.
            whole_steps: Whether steps gather parameters outside units; see
                :class:`~dlo_plugins.parallel.fsdp.sharding.ShardOptions`.
            param_dtype: Dtype in which parameters are gathered, if the applier's own is not set.

        Raises:
            DloError: The dtypes do not fit the precision.
        """
        param_dtype, reshard = self.dtypes[0] or param_dtype, self.reshard_after_forward
        if param_dtype is None and spec.dp_replicate * spec.dp_shard * spec.cp > 1:
            param_dtype = default_param_dtype(precision, device, module)
        if reshard is None and spec.pp > 1:
            # Otherwise each micro-batch would gather a stage's parameters again, in forward and in backward.
            reshard = False
        return ShardOptions(
            policy=mixed_precision(precision, param_dtype, *self.dtypes[1:]),
            reshard_after_forward=reshard,
            offload=self.offload,
            recompute=self.recompute,
            # A schedule calls units without the step's root, so that FSDP would gather each after the one before.
            forward_prefetch=self.prefetch[0] or int(spec.pp > 1),
            backward_prefetch=self.prefetch[1],
            whole_steps=whole_steps,
        )

    def send_gradients_in(self, dtype: torch.dtype) -> None:
        """Sends gradients over the data axes in a half precision."""
        param, reduce, output = self.dtypes
        check_sent_dtype(reduce, dtype)
        self.dtypes = (param, str(dtype).removeprefix("torch."), output)

    def apply_to_run(self, run: Any) -> None:
        """Shards a run's module unit by unit, with the task's steps as the root."""
        module, layout = run.module, run.layout
        units = find_units(module) if self.units is None else match_units(module, self.units)
        # Experts that `ep` divides have ranks of their own, and so units of their own.
        units = list(dict.fromkeys([*units, *layout.expert_modules]))
        units = [unit for unit in units if not any(name.startswith(f"{unit}.") for name in layout.other_stages)]
        options = run.options.shard_options(module)
        run.sharded = ShardedModule(module, units, run.groups, run.options.device, options, run.seed, layout)

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Shards a model's blocks and then its root, over the axis `dp_shard` and, if there is one, `dp_replicate`.

        It is for your own strategies; MeshStrategy calls :meth:`apply_to_run`.
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
