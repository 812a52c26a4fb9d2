"""Master weights of ZeRO stage 3: this rank's segments of the parameters of each sub-group.

The class reads private attributes of DeepSpeed's ``DeepSpeedZeroOptimizer_Stage3`` (0.15 to 0.19). A layout that does
not match raises an error, and never gives a wrong checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.shards import FlatShard
from dlo_plugins.deepspeed.deepspeed_layout import Stage3Layout
from dlo_plugins.deepspeed.master_weights import MasterPartition, MasterWeights, check_length


class Stage3Weights(MasterWeights):
    """Master weights of stage 3: this rank's segments of the parameters of each sub-group."""

    def _find(self, names: Mapping[int, str]) -> list[MasterPartition]:
        zero, rank, found = self.zero, dist.get_rank(), []
        if self.swapped:
            return []
        for number, master in enumerate(zero.fp32_partitioned_groups_flat):
            group = zero.fp16_groups[number]
            layout = Stage3Layout(tuple(p.ds_numel for p in group), dist.get_world_size())
            check_length(sum(layout.segments), master)
            shapes = [torch.Size(p.ds_shape) for p in group]
            place = zero.sub_group_to_group_id[number]
            found.append(MasterPartition(master, place, [names[id(p)] for p in group], shapes, layout.slices(rank)))
        return found

    def _group_names(self, names: Mapping[int, str]) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for flat in self.partitions:
            found[flat.group].extend(flat.names)
        return found

    @property
    def offloaded(self) -> bool:
        """Whether DeepSpeed keeps gradients of the partitions in buffers of its own, for the CPU to step."""
        return bool(self.zero.offload_optimizer)

    @property
    def swapped(self) -> bool:
        """Whether DeepSpeed reads partitions from NVMe for each step, and holds none in memory between steps."""
        return bool(self.zero.swap_optimizer)

    def shards(self) -> dict[str, FlatShard]:
        """Returns the master weights by name: this rank's slices, empty ones included.

        Raises:
            DloError: If they are on NVMe.
        """
        if self.swapped:
            raise DloError(
                "offload_optimizer must be cpu to save checkpoints, got nvme, from which checkpoints cannot read yet;"
                " set offload_optimizer: cpu, or --trainer.enable_checkpointing false"
            )
        return super().shards()

    def gradients(self) -> list[Tensor]:
        """Returns the gradients; of those on NVMe their norms."""
        if not self.swapped:
            return super().gradients()
        return [torch.tensor(float(norm)) for norm in self.zero.norm_for_param_grads.values()]

    def expose_partitions(self) -> None:
        """Puts the partitions in the optimizer's parameter groups, which are empty outside DeepSpeed's step."""
        for group in self.optimizer.param_groups:
            group["params"] = []
        for flat in self.partitions:
            self.optimizer.param_groups[flat.group]["params"].append(flat.tensor)

    def hide_partitions(self) -> None:
        """Empties the groups: DeepSpeed inserts and steps one partition after the other."""
        for group in self.optimizer.param_groups:
            group["params"] = []

    def store_grads(self) -> None:
        """Does nothing: callbacks see the memory that DeepSpeed steps with."""

    def load_params(self) -> None:
        """Copies the partitions into the parameters of all ranks."""
        self.zero._partition_all_parameters()
        for number in range(len(self.partitions)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        gather_persistent(self.zero.parameter_offload)
        self.zero.invalidate_secondary_tensor()

    def _averaged(self, number: int) -> list[Tensor] | None:
        return self.zero.averaged_gradients.get(number)

    def _replace(self, number: int, runs: list[Tensor], flat: Tensor) -> None:
        self.zero.averaged_gradients[number] = runs

    def buffers(self) -> list[Tensor]:
        """Returns DeepSpeed's gradient buffers, beside the parameters' and the partitions' own memory."""
        return [self.zero.grad_partitions_flat_buffer]

    def drop_grads(self) -> None:
        """Drops the gradients of a skipped step."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        zero.averaged_gradients = {}
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()

    def start_window(self) -> None:
        """Prepares the gradient buffers, and clears those of the last step."""
        super().start_window()
        if self.zero.micro_step_id == 0 and not self.zero._epilogue_ran_this_backward:
            self.zero.grad_partitions_flat_buffer.zero_()

    def grad_shards(self) -> dict[str, FlatShard]:
        """Returns this rank's shards of the gradients of an unfinished accumulation, by parameter."""
        found: dict[str, FlatShard] = {}
        at, buffer = 0, self.zero.grad_partitions_flat_buffer
        for flat in self.partitions:
            found |= flat.shards(buffer[at : at + flat.tensor.numel()])
            at += flat.tensor.numel()
        return found

    def zero_grad_shards(self, names: list[str]) -> dict[str, FlatShard]:
        """Returns zeroed shards into which the gradients of an unfinished accumulation are loaded."""
        self.zero.grad_partitions_flat_buffer.zero_()
        self.zero.micro_step_id = 1  # One micro-batch has run.
        return {name: shard for name, shard in self.grad_shards().items() if name in names}


def gather_persistent(offload: Any) -> None:
    """Gathers the small parameters that stage 3 keeps in full on each rank, after their segments have changed.

    Args:
        offload: Object that gathers parameters for DeepSpeed's modules, a ``DeepSpeedZeRoOffload``.
    """
    offload.partition_all_parameters()
    if offload.persistent_parameters:
        offload.persistent_parameters[0].all_gather(offload.persistent_parameters)
