"""Master weights of ZeRO stages 1 and 2, and of stage 0 in half precision.

The classes read private attributes of DeepSpeed's ``DeepSpeedZeroOptimizer`` and ``FP16_UnfusedOptimizer`` (0.15 to
0.19). A layout that does not match raises an error, and never gives a wrong checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.shards import FlatShard
from dlo_plugins.deepspeed.deepspeed_layout import Stage12Layout
from dlo_plugins.deepspeed.master_weights import MasterPartition, MasterWeights, check_length
from dlo_plugins.sharding.flat_slices import FlatSlice


class _Runs(list[Tensor]):
    """Gradient of a partition in runs, with the tensor that they are slices of (DeepSpeed 0.19 reads it)."""

    flat_partition: Tensor


class Stage12Weights(MasterWeights):
    """Master weights of stages 1 and 2: this rank's segment of each parameter group's flat buffer."""

    def _find(self, names: Mapping[int, str]) -> list[MasterPartition]:
        zero, rank, found = self.zero, dist.get_rank(), []
        for number, master in enumerate(zero.single_partition_of_fp32_groups):
            ordered = zero.round_robin_bit16_groups[number]
            aligned = getattr(zero, "parameter_alignment", False)
            unit = 16 // math.gcd(16, ordered[0].element_size()) if aligned else 1
            layout = Stage12Layout(tuple(p.numel() for p in ordered), dist.get_world_size(), unit)
            check_length(layout.segment, master)
            shapes = [p.shape for p in ordered]
            found.append(MasterPartition(master, number, [names[id(p)] for p in ordered], shapes, layout.slices(rank)))
        return found

    def _group_names(self, names: Mapping[int, str]) -> list[list[str]]:
        return [[names[id(p)] for p in group] for group in self.zero.bit16_groups]

    @property
    def offloaded(self) -> bool:
        """Whether DeepSpeed keeps gradients of the partitions in buffers of its own, for the CPU to step."""
        return bool(self.zero.cpu_offload)

    def expose_partitions(self) -> None:
        """Marks the parameters as updated: the partitions are in the optimizer's parameter groups."""
        self.mark_mirrored()

    def hide_partitions(self) -> None:
        """Does nothing: the partitions stay in the optimizer's parameter groups."""

    def store_grads(self) -> None:
        """Does nothing: callbacks see the memory that DeepSpeed steps with."""

    def load_params(self) -> None:
        """Copies the partitions into the parameters of all ranks."""
        self.zero.update_lp_params()
        self.mark_mirrored()

    @torch.no_grad()
    def store_writes(self, *, always: bool) -> None:
        """Copies this rank's segments of the parameters into the partitions, in single precision.

        Args:
            always: Whether partitions in CPU memory are written too, to which the copy is slow.
        """
        for number, flat in enumerate(self.partitions if always or not self.offloaded else ()):
            if flat.tensor._version == self._mirrored[number]:  # Otherwise it was written itself since.
                flat.tensor.copy_(self.zero.parallel_partitioned_bit16_groups[number][dist.get_rank()])
        self.mark_mirrored()

    def mark_mirrored(self) -> None:
        """Marks the parameters as equal to the partitions."""
        self._mirrored = [flat.tensor._version for flat in self.partitions]

    def _averaged(self, number: int) -> list[Tensor] | None:
        return self.zero.averaged_gradients.get(number)

    def _replace(self, number: int, runs: list[Tensor], flat: Tensor) -> None:
        was, shown = self.zero.averaged_gradients[number], _Runs(runs)
        for old, new in zip(was, runs, strict=True):
            if getattr(old, "_zero_padding", False):
                new._zero_padding = True  # type: ignore[attr-defined]  # It counts runs and parameters.
        if sum(run.numel() for run in runs) < flat.numel():
            shown.append(flat[sum(run.numel() for run in runs) :])
            shown[-1]._zero_padding = True  # type: ignore[attr-defined]
        shown.flat_partition = flat
        self.zero.averaged_gradients[number] = shown

    def buffers(self) -> list[Tensor]:
        """Returns DeepSpeed's gradient buffers, beside the parameters' and the partitions' own memory."""
        lists = [*self.zero.averaged_gradients.values(), *self.zero.all_grad_tensors.values()]
        return [run for runs in lists if runs is not None for run in runs]

    def drop_grads(self) -> None:
        """Drops the gradients of a skipped step."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        zero.micro_step_id = -1
        for number in list(zero.averaged_gradients):
            zero.averaged_gradients[number] = None
        for number in list(zero.all_grad_tensors):
            zero.all_grad_tensors[number] = None
        if zero.cpu_offload:
            zero.reset_cpu_buffers()

    def grad_shards(self) -> dict[str, FlatShard]:
        """Returns this rank's shards of the gradients of an unfinished accumulation, by parameter."""
        return {
            flat.names[piece.parameter]: FlatShard(run, flat.shapes[piece.parameter], piece.start)
            for number, flat in enumerate(self.partitions)
            for piece, run in self._open(number, flat)
        }

    def _open(self, number: int, flat: MasterPartition) -> list[tuple[FlatSlice, Tensor]]:
        """Returns the pieces that have a gradient so far, with it, in the buffer that DeepSpeed adds to."""
        zero = self.zero
        compact = getattr(zero.averaged_gradients.get(number), "flat_partition", None)
        if compact is not None:
            return [(piece, compact[piece.offset : piece.offset + piece.length]) for piece in flat.pieces]
        found = []
        kept = zero.all_grad_tensors.get(number)
        for place, piece in enumerate(flat.pieces):
            if zero.cpu_offload:
                parameter = zero.round_robin_bit16_groups[number][piece.parameter]
                whole = zero.accumulated_grads_in_cpu.get(zero.get_param_id(parameter))
                whole = whole if zero.micro_step_id >= 0 else None
            else:
                whole = kept[place] if kept is not None else None
            if whole is not None:
                found.append((piece, whole.view(-1)[piece.start : piece.start + piece.length]))
        return found

    def zero_grad_shards(self, names: list[str]) -> dict[str, FlatShard]:
        """Returns zeroed shards into which the gradients of an unfinished accumulation are loaded."""
        zero = self.zero
        for number in range(len(self.partitions)):
            if _compact(zero, number):
                zero.averaged_gradients[number] = zero._build_compact_grad_partition_buffer(number)
            elif zero.cpu_offload:
                for parameter in zero.params_in_partition[number]:
                    zeros = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=zero.device)
                    zero.accumulated_grads_in_cpu[zero.get_param_id(parameter)] = zeros
            else:
                dtype = zero.gradient_accumulation_dtype
                zero.all_grad_tensors[number] = [
                    torch.zeros_like(parameter, dtype=dtype) for parameter in zero.params_in_partition[number]
                ]
        zero.micro_step_id = 0  # One micro-batch has run.
        return {name: shard for name, shard in self.grad_shards().items() if name in names}


def _compact(zero: Any, number: int) -> bool:
    """Returns whether DeepSpeed (0.19) accumulates micro-batches in one flat buffer."""
    asked = getattr(zero, "_use_compact_grad_partition_buffer", None)
    return bool(asked is not None and asked(number))


class Stage0Weights(MasterWeights):
    """Master weights of stage 0 in half precision: full copies in single precision on each rank."""

    sharded = False

    def __init__(self, zero: Any, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._exposed: dict[int, int] = {}  # version counters of exposed gradients
        super().__init__(zero, optimizer, names)

    @torch.no_grad()
    def undo_first_step(self) -> None:
        """Undoes the step on zero gradients by which DeepSpeed creates the optimizer's state.

        It counts as a step, so that Adam's first update would be three quarters of its size, and it decays the weights.
        torch creates the state in the first real step.
        """
        if isinstance(self.optimizer, torch.optim.Adagrad):  # Its state exists from the start.
            for state in self.optimizer.state.values():
                state["step"].zero_()
        else:
            self.optimizer.state.clear()
        for flat, half in zip(self.partitions, self._halves(), strict=True):
            flat.tensor.copy_(half)

    def _find(self, names: Mapping[int, str]) -> list[MasterPartition]:
        return [
            MasterPartition(master, group, [names[id(p)]], [p.shape], [FlatSlice(0, 0, p.numel(), 0)])
            for group, (halves, masters) in enumerate(zip(self.zero.fp16_groups, self.zero.fp32_groups, strict=True))
            for p, master in zip(halves, masters, strict=True)
        ]

    def _group_names(self, names: Mapping[int, str]) -> list[list[str]]:
        return [[names[id(p)] for p in group] for group in self.zero.fp16_groups]

    @property
    def offloaded(self) -> bool:
        """Whether DeepSpeed keeps gradients of the partitions in buffers of its own: False in stage 0."""
        return False

    def expose_partitions(self) -> None:
        """Does nothing: the copies stay in the optimizer's parameter groups."""

    def hide_partitions(self) -> None:
        """Does nothing: the copies stay in the optimizer's parameter groups."""

    def load_params(self) -> None:
        """Rounds the copies into the parameters."""
        for flat, half in zip(self.partitions, self._halves(), strict=True):
            half.data.copy_(flat.tensor.data)

    def _halves(self) -> list[Tensor]:
        return [p for group in self.zero.fp16_groups for p in group]

    def _averaged(self, number: int) -> list[Tensor] | None:
        gradient = self._halves()[number].grad
        return None if gradient is None else [gradient]

    def _replace(self, number: int, runs: list[Tensor], flat: Tensor) -> None:
        """Keeps the gradients in half precision: DeepSpeed copies them once more."""
        self._exposed[number] = flat._version

    @torch.no_grad()
    def store_grads(self) -> None:
        """Rounds gradients that callbacks have changed into those that DeepSpeed copies."""
        for number, (flat, half) in enumerate(zip(self.partitions, self._halves(), strict=True)):
            shown = flat.tensor.grad
            if shown is not None and half.grad is not None and shown._version != self._exposed.get(number):
                half.grad.copy_(shown.view_as(half))
        self._exposed.clear()

    def buffers(self) -> list[Tensor]:
        """Returns DeepSpeed's gradient buffers, beside the parameters' and the partitions' own: none in stage 0."""
        return []

    def drop_grads(self) -> None:
        """Drops the gradients of a skipped step."""
        self.zero.zero_grad(set_to_none=True)

    def grad_shards(self) -> dict[str, FlatShard]:
        """Returns an empty mapping: each rank has its own full gradients, in the parameters."""
        return {}

    def zero_grad_shards(self, names: list[str]) -> dict[str, FlatShard]:
        """Returns an empty mapping: each rank has its own full gradients, in the parameters."""
        return {}
