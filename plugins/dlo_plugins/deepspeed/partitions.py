"""DeepSpeed's partitions: their layout, stage 3's partitioned parameters, and the master weights that it steps.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054; in the layout of DeepSpeed (0.15 to 0.19).

- Stages 1 and 2: the parameters of an optimizer's group are concatenated in a flat buffer, perhaps in another order
  (``round_robin_gradients``) or with gaps (``parameter_alignment``). Its length is rounded up to an even number of
  elements for each rank, and each rank holds one of as many equal segments.
- Stage 3: every parameter is split by itself into as many equal segments as there are ranks, the last ones padded. A
  rank's segments of the parameters of a sub-group are concatenated, padding included.

A partitioned parameter (DeepSpeed 0.15 to 0.19) has an empty tensor, ``ds_tensor`` with this rank's segment and its
padding, and ``ds_shape`` and ``ds_numel`` of the full tensor.

DeepSpeed does not keep the parameters' names, so the layouts find them. The classes of master weights read private
attributes of DeepSpeed's ``DeepSpeedZeroOptimizer``, ``DeepSpeedZeroOptimizer_Stage3`` and ``FP16_UnfusedOptimizer``
(0.15 to 0.19). A layout that does not match raises an error, and never gives a wrong checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.distributed.failure import is_lost_connection
from dlo_framework.errors import DloError
from dlo_framework.shards import FlatShard
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.parallel.flat_slices import FlatSlice, find_flat_slices
from dlo_plugins.parallel.user_code import OutsideUse, calling_module

# --- layout -----------------------------------------------------------------------------------------------

#: Segments of stages 1 and 2 begin at a multiple of this number of elements: NCCL's 4 bytes in half precision.
ALIGNMENT = 2


@dataclass(frozen=True)
class Stage12Layout:
    """Layout of a group's parameters in the flat buffer of stages 1 and 2.

    Attributes:
        numels: Number of elements of each parameter, in the buffer's order.
        ranks: Number of segments of the buffer, one for each rank.
        aligned: Number of elements to whose multiples parameters are aligned (``parameter_alignment``); 1 leaves no
            gaps.
    """

    numels: tuple[int, ...]
    ranks: int
    aligned: int = 1

    @property
    def starts(self) -> list[int]:
        """The offset of each parameter in the buffer, in elements."""
        starts, at = [], 0
        for numel in self.numels:
            starts.append(at)
            at += numel
            at += -at % self.aligned
        return starts

    @property
    def segment(self) -> int:
        """The number of elements of a rank's segment, padding included."""
        held = self.starts[-1] + self.numels[-1] if self.numels else 0
        unit = ALIGNMENT * self.ranks
        return math.ceil(held / unit) * unit // self.ranks

    def slices(self, rank: int) -> list[FlatSlice]:
        """Returns the slices of the parameters in a rank's segment, in the order of the buffer."""
        places = ((start, start + numel) for start, numel in zip(self.starts, self.numels, strict=True))
        return find_flat_slices(places, rank * self.segment, (rank + 1) * self.segment)


@dataclass(frozen=True)
class Stage3Layout:
    """Layout of a sub-group's parameters in stage 3.

    Attributes:
        numels: Number of elements of each parameter, in order.
        ranks: Number of segments of each parameter, one for each rank.
    """

    numels: tuple[int, ...]
    ranks: int

    @property
    def segments(self) -> list[int]:
        """The number of elements of each parameter's segment, padding included."""
        return [math.ceil(numel / self.ranks) for numel in self.numels]

    def slices(self, rank: int) -> list[FlatSlice]:
        """Returns the slices of the parameters on a rank, in the order of its flat partition, without the padding."""
        slices, at = [], 0
        for number, (numel, segment) in enumerate(zip(self.numels, self.segments, strict=True)):
            first, last = min(rank * segment, numel), min((rank + 1) * segment, numel)
            if first < last:
                slices.append(FlatSlice(number, first, last - first, at))
            at += segment
        return slices


# --- partitioned parameters -------------------------------------------------------------------------------

#: Packages that use partitioned parameters as DeepSpeed wants it.
_LIBRARIES = ("deepspeed.", "dlo_framework.", "dlo_plugins.", "lightning.")


def is_partitioned(parameter: Tensor) -> bool:
    """Returns whether stage 3 has partitioned a parameter."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Any) -> torch.Size:
    """Returns the full shape of a parameter, partitioned or not."""
    return torch.Size(parameter.ds_shape) if is_partitioned(parameter) else parameter.shape


def local_partition(parameter: Any) -> Tensor:
    """Returns the local tensor of a parameter: this rank's segment with padding if it is partitioned."""
    return parameter.ds_tensor if is_partitioned(parameter) else parameter


def segment(parameter: Any) -> FlatShard:
    """Returns this rank's segment of a partitioned parameter, without padding; it shares DeepSpeed's memory."""
    pieces = Stage3Layout((parameter.ds_numel,), dist.get_world_size()).slices(dist.get_rank())
    kept = parameter.ds_tensor.data
    if not pieces:
        return FlatShard(kept[:0], full_shape(parameter), 0)
    return FlatShard(kept[: pieces[0].length], full_shape(parameter), pieces[0].start)


def segments(module: nn.Module) -> dict[str, FlatShard]:
    """Returns this rank's segments of all partitioned parameters by name; empty below stage 3."""
    return {plain_name(name): segment(p) for name, p in module.named_parameters() if is_partitioned(p)}


def partition_params(module: nn.Module, config: dict[str, Any]) -> None:
    """Partitions a module's parameters one by one: the device never holds more than one full tensor.

    By default DeepSpeed moves the whole module to the device first.

    Args:
        module: Module whose parameters become those of the first rank.
        config: Complete DeepSpeed configuration.
    """
    import deepspeed

    deepspeed.zero.Init(module=module, config_dict_or_path=config)


@torch.no_grad()
def gather_params(module: nn.Module, attributes: Mapping[int, dict[str, Any]]) -> None:
    """Gathers partitioned parameters one by one, on the CPU; called on all ranks.

    DeepSpeed (0.15 to 0.19) has no inverse of ``zero.Init``: this function removes what it has set on parameters and
    modules.

    Args:
        module: Module whose hooks have been removed.
        attributes: Attributes of each parameter before it was partitioned, by id.
    """
    for parameter in module.parameters():
        gathered: Any = parameter
        gathered.all_gather([parameter])
        parameter.data = parameter.data.to("cpu", copy=True)
        vars(parameter).clear()
        vars(parameter).update(attributes[id(parameter)])
    for child in module.modules():
        if "_original_parameters" in vars(child):
            child._parameters = vars(child).pop("_original_parameters")


@contextlib.contextmanager
def refuse_empty(module: nn.Module, where: str, *, allows_data: bool = False) -> Iterator[None]:
    """Refuses uses of partitioned parameters inside the block, which DeepSpeed gathers for their own modules alone.

    Args:
        module: Module with the parameters.
        where: Name of the code in the block, for the message.
        allows_data: Whether the ``data`` of gathered parameters may be read, and so be written unseen.

    Raises:
        DloError: The user's code uses a parameter that is not gathered, or the ``data`` of one.
    """
    known: dict[int, tuple[str, Any]] = {id(p): (plain_name(name), p) for name, p in module.named_parameters()}

    def on_use(parameter: int, by_data: bool) -> None:
        name, tensor = known[parameter]
        is_gathered = not is_partitioned(tensor) or tensor.ds_status.name == "AVAILABLE"
        if not (is_gathered and (allows_data or not by_data)) and not calling_module().startswith(_LIBRARIES):
            raise DloError(
                "weights under DeepSpeed's stage 3 must be used in their own module's forward, got a use of"
                f" {name}{'.data' * by_data} in {where}; use strategy zero3, which gathers them there, or a lower stage"
            )

    with OutsideUse(set(known), on_use):
        yield


@contextlib.contextmanager
def explain_step() -> Iterator[None]:
    """Explains an error of a step that DeepSpeed or a backward raises, as where weights are used after their release.

    Raises:
        DloError: Such an error was raised.
    """
    try:
        yield
    except (DloError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frames = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
        raiser = next((name for name in frames if not name.startswith(("torch.", "dlo_plugins."))), "")
        if is_lost_connection(error) or not (raiser.startswith("deepspeed.") or frames[0] == "torch.autograd.graph"):
            raise
        raise DloError(
            "a step under DeepSpeed's stage 3 must use weights in their own module's forward, and take one backward of"
            f" it, got {type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}; use strategy zero3, or"
            " ddp where the error may be the model's own"
        ) from error


# --- master weights ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MasterPartition:
    """Flat tensor that the optimizer steps on this rank.

    Attributes:
        tensor: Partition, 1-D with padding, or the copy of a full parameter; it shares DeepSpeed's memory.
        group: Index of the optimizer's parameter group.
        shapes: Full shapes of the parameters with a slice in any rank's partition, by name, in the layout's order.
        pieces: Slices of the parameters in this rank's partition, by name.
    """

    tensor: Tensor
    group: int
    shapes: dict[str, torch.Size]
    pieces: dict[str, FlatSlice]

    def shard(self, name: str, values: Tensor) -> FlatShard:
        """Returns the slice of a parameter in a tensor laid out as the partition; empty if this rank has none."""
        piece = self.pieces.get(name, FlatSlice(0, 0, 0, 0))
        data = values.view(-1)[piece.offset : piece.offset + piece.length]
        return FlatShard(data, self.shapes[name], piece.start)

    def shards(self, values: Tensor) -> dict[str, FlatShard]:
        """Returns the slices of this rank's parameters in a tensor that is laid out as the partition, by name."""
        return {name: self.shard(name, values) for name in self.pieces}


class MasterWeights:
    """This rank's master weights (partitions in single precision) and their gradients.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        optimizer: Inner optimizer, which steps the partitions.
        names: Names of the parameters by id.

    Attributes:
        partitions: Partitions of this rank.
        homes: Partition of each parameter that is in one, by name.
        sharded: Whether each rank has different slices of the parameters.
    """

    sharded = True

    def __init__(self, zero: Any, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.zero, self.optimizer, self.names = zero, optimizer, names
        self.partitions = self._find()
        self.homes = {name: flat for flat in self.partitions for name in flat.shapes}
        self._buffers = [flat.tensor.grad for flat in self.partitions]
        self.expose_partitions()

    def _find(self) -> list[MasterPartition]:
        """Returns this rank's partitions."""
        raise NotImplementedError

    def _partition(
        self, tensor: Tensor, group: int, params: Sequence[Any], layout: Stage12Layout | Stage3Layout
    ) -> MasterPartition:
        """Returns a partition of parameters, whose length must be that of the layout that dlo knows."""
        length = layout.segment if isinstance(layout, Stage12Layout) else sum(layout.segments)
        if tensor.numel() != length:
            raise DloError(
                f"a DeepSpeed partition must have {length} elements by the layout that dlo knows, got {tensor.numel()};"
                " this DeepSpeed version has another layout: use version 0.15 to 0.19, or strategy zero2 or zero3"
            )
        names = [self.names[id(p)] for p in params]
        pieces = {names[piece.parameter]: piece for piece in layout.slices(dist.get_rank() if self.sharded else 0)}
        return MasterPartition(tensor, group, dict(zip(names, map(full_shape, params), strict=True)), pieces)

    def group_names(self) -> list[list[str]]:
        """Returns the names of all ranks' parameters in each of the optimizer's parameter groups, in its order."""
        names: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for flat in self.partitions:
            names[flat.group].extend(flat.shapes)
        return names

    @property
    def offloaded(self) -> bool:
        """Whether DeepSpeed keeps gradients of the partitions in buffers of its own, for the CPU to step."""
        return False

    def load_params(self) -> None:
        """Copies the partitions into the parameters of all ranks; called on all of them."""
        raise NotImplementedError

    def expose_partitions(self) -> None:
        """Puts the partitions into the optimizer's parameter groups, where callbacks look for them."""

    def hide_partitions(self) -> None:
        """Undoes :meth:`expose_partitions`, for DeepSpeed's step."""

    # --- gradients -----------------------------------------------------------------------------------------

    def _averaged(self, number: int) -> list[Tensor] | None:
        """Returns the gradient of a partition as consecutive runs; None if there is none."""
        raise NotImplementedError

    def _replace(self, number: int, runs: list[Tensor], flat: Tensor) -> None:
        """Replaces the gradient that DeepSpeed steps with."""
        raise NotImplementedError

    def drop_grads(self) -> None:
        """Drops the gradients of a skipped step."""
        raise NotImplementedError

    def buffers(self) -> list[Tensor]:
        """Returns DeepSpeed's gradient buffers, beside the parameters' and the partitions' own memory."""
        return []

    def grad_shards(self) -> dict[str, FlatShard]:
        """Returns this rank's shards of the gradients of an unfinished accumulation, by parameter."""
        return {}

    def zero_grad_shards(self, names: list[str]) -> dict[str, FlatShard]:
        """Returns zeroed shards into which the gradients of an unfinished accumulation are loaded."""
        return {}

    def start_window(self) -> None:
        """Prepares the gradient buffers, before each backward.

        DeepSpeed copies gradients into memory that ``zero_grad`` has freed, and there keeps an earlier step's gradients
        of parameters that this step does not use.
        """
        if self.offloaded:
            for flat, buffer in zip(self.partitions, self._buffers, strict=True):
                if flat.tensor.grad is None and buffer is not None:
                    flat.tensor.grad = buffer.zero_()

    @torch.no_grad()
    def expose_grads(self) -> None:
        """Sets each partition's gradient as its ``grad``, so that callbacks can read and change it.

        It is the memory that DeepSpeed steps with, in the partitions' precision; DeepSpeed would make that copy in its
        step.
        """
        if self.offloaded:
            return  # It is set already.
        for number, flat in enumerate(self.partitions):
            runs = self._averaged(number)
            if runs is None:
                continue
            shown = _joined(runs, flat.tensor)
            flat.tensor.grad = shown.view_as(flat.tensor)
            self._replace(number, list(shown.split([run.numel() for run in runs])), shown)

    def store_grads(self) -> None:
        """Stores gradients that callbacks have changed, where what they see is a copy; before a step."""

    @property
    def dropped(self) -> bool:
        """Whether a callback has dropped the exposed gradients, so that the step is skipped."""
        return bool(self.partitions) and all(flat.tensor.grad is None for flat in self.partitions)

    def gradients(self) -> list[Tensor]:
        """Returns tensors with the joint 2-norm of this rank's shard of the gradient."""
        return [flat.tensor.grad for flat in self.partitions if flat.tensor.grad is not None]

    # --- state ---------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, FlatShard]:
        """Returns the master weights by name: this rank's slices, empty ones included."""
        return {name: flat.shard(name, flat.tensor.detach()) for name, flat in self.homes.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the partition of each parameter of which this rank has a slice."""
        return {name: flat.tensor for flat in self.partitions for name in flat.pieces}


def _joined(runs: list[Tensor], like: Tensor) -> Tensor:
    """Returns runs as one flat tensor of the partition's length and precision, sharing their memory if possible."""
    whole = getattr(runs, "flat_partition", None)
    if whole is None:
        flat = [run.reshape(-1) for run in runs]
        missing = like.numel() - sum(run.numel() for run in flat)
        if missing:
            flat.append(flat[0].new_zeros(missing))
        whole = flat[0] if len(flat) == 1 else torch.cat(flat)
    return whole.view(-1).to(like.dtype)


class Stage0Weights(MasterWeights):
    """Master weights of stage 0 in half precision: full copies in single precision on each rank."""

    sharded = False

    def __init__(self, zero: Any, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._exposed: dict[int, int] = {}  # version counters of exposed gradients
        self._halves = [p for group in zero.fp16_groups for p in group]
        super().__init__(zero, optimizer, names)

    def _find(self) -> list[MasterPartition]:
        return [
            self._partition(master, group, [p], Stage3Layout((p.numel(),), 1))
            for group, (halves, masters) in enumerate(zip(self.zero.fp16_groups, self.zero.fp32_groups, strict=True))
            for p, master in zip(halves, masters, strict=True)
        ]

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
        for flat, half in zip(self.partitions, self._halves, strict=True):
            flat.tensor.copy_(half)

    def load_params(self) -> None:
        """Rounds the copies into the parameters."""
        for flat, half in zip(self.partitions, self._halves, strict=True):
            half.data.copy_(flat.tensor.data)

    def _averaged(self, number: int) -> list[Tensor] | None:
        gradient = self._halves[number].grad
        return None if gradient is None else [gradient]

    def _replace(self, number: int, runs: list[Tensor], flat: Tensor) -> None:
        """Keeps the gradients in half precision: DeepSpeed copies them once more."""
        self._exposed[number] = flat._version

    @torch.no_grad()
    def store_grads(self) -> None:
        """Rounds gradients that callbacks have changed into those that DeepSpeed copies."""
        for number, (flat, half) in enumerate(zip(self.partitions, self._halves, strict=True)):
            shown = flat.tensor.grad
            if shown is not None and half.grad is not None and shown._version != self._exposed.get(number):
                half.grad.copy_(shown.view_as(half))
        self._exposed.clear()

    def drop_grads(self) -> None:
        """Drops the gradients of a skipped step."""
        self.zero.zero_grad(set_to_none=True)


class _Runs(list[Tensor]):
    """Gradient of a partition in runs, with the tensor that they are slices of (DeepSpeed 0.19 reads it)."""

    flat_partition: Tensor


class Stage12Weights(MasterWeights):
    """Master weights of stages 1 and 2: this rank's segment of each parameter group's flat buffer."""

    def _find(self) -> list[MasterPartition]:
        zero, partitions = self.zero, []
        for number, master in enumerate(zero.single_partition_of_fp32_groups):
            ordered = zero.round_robin_bit16_groups[number]
            aligned = getattr(zero, "parameter_alignment", False)
            unit = 16 // math.gcd(16, ordered[0].element_size()) if aligned else 1
            layout = Stage12Layout(tuple(p.numel() for p in ordered), dist.get_world_size(), unit)
            partitions.append(self._partition(master, number, ordered, layout))
        return partitions

    def group_names(self) -> list[list[str]]:
        """Returns the names of all ranks' parameters in each of the optimizer's parameter groups, in its order."""
        return [[self.names[id(p)] for p in group] for group in self.zero.bit16_groups]

    @property
    def offloaded(self) -> bool:
        """Whether DeepSpeed keeps gradients of the partitions in buffers of its own, for the CPU to step."""
        return bool(self.zero.cpu_offload)

    def expose_partitions(self) -> None:
        """Marks the parameters as equal to the partitions, which are always in the optimizer's parameter groups."""
        self._mirrored = [flat.tensor._version for flat in self.partitions]

    def load_params(self) -> None:
        """Copies the partitions into the parameters of all ranks."""
        self.zero.update_lp_params()
        self.expose_partitions()

    @torch.no_grad()
    def store_writes(self, *, always: bool) -> None:
        """Copies this rank's segments of the parameters into the partitions, in single precision.

        Args:
            always: Whether partitions in CPU memory are written too, to which the copy is slow.
        """
        for number, flat in enumerate(self.partitions if always or not self.offloaded else ()):
            if flat.tensor._version == self._mirrored[number]:  # Otherwise it was written itself since.
                flat.tensor.copy_(self.zero.parallel_partitioned_bit16_groups[number][dist.get_rank()])
        self.expose_partitions()

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
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        if zero.cpu_offload:
            zero.reset_cpu_buffers()

    def grad_shards(self) -> dict[str, FlatShard]:
        """Returns this rank's shards of the gradients of an unfinished accumulation, by parameter."""
        return {
            name: FlatShard(run, flat.shapes[name], flat.pieces[name].start)
            for number, flat in enumerate(self.partitions)
            for name, run in self._open(number, flat)
        }

    def _open(self, number: int, flat: MasterPartition) -> list[tuple[str, Tensor]]:
        """Returns the parameters that have a gradient so far, with it, in the buffer that DeepSpeed adds to."""
        zero = self.zero
        compact = getattr(zero.averaged_gradients.get(number), "flat_partition", None)
        if compact is not None:
            return [(name, shard.data) for name, shard in flat.shards(compact).items()]
        gradients = []
        kept = zero.all_grad_tensors.get(number)
        for place, (name, piece) in enumerate(flat.pieces.items()):
            if zero.cpu_offload:
                parameter = zero.round_robin_bit16_groups[number][piece.parameter]
                whole = zero.accumulated_grads_in_cpu.get(zero.get_param_id(parameter))
                whole = whole if zero.micro_step_id >= 0 else None
            else:
                whole = kept[place] if kept is not None else None
            if whole is not None:
                gradients.append((name, whole.view(-1)[piece.start : piece.start + piece.length]))
        return gradients

    def zero_grad_shards(self, names: list[str]) -> dict[str, FlatShard]:
        """Returns zeroed shards into which the gradients of an unfinished accumulation are loaded."""
        zero = self.zero
        compact = getattr(zero, "_use_compact_grad_partition_buffer", lambda number: False)  # In DeepSpeed 0.19.
        for number in range(len(self.partitions)):
            own = zero.params_in_partition[number]
            if compact(number):  # It accumulates micro-batches in one flat buffer.
                zero.averaged_gradients[number] = zero._build_compact_grad_partition_buffer(number)
            elif zero.cpu_offload:
                for parameter in own:
                    zeros = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=zero.device)
                    zero.accumulated_grads_in_cpu[zero.get_param_id(parameter)] = zeros
            else:
                dtype = zero.gradient_accumulation_dtype
                zero.all_grad_tensors[number] = [torch.zeros_like(parameter, dtype=dtype) for parameter in own]
        zero.micro_step_id = 0  # One micro-batch has run.
        return {name: shard for name, shard in self.grad_shards().items() if name in names}


class Stage3Weights(MasterWeights):
    """Master weights of stage 3: this rank's segments of the parameters of each sub-group."""

    def _find(self) -> list[MasterPartition]:
        zero, partitions = self.zero, []
        for number, master in enumerate(() if self.swapped else zero.fp32_partitioned_groups_flat):
            group = zero.fp16_groups[number]
            layout = Stage3Layout(tuple(p.ds_numel for p in group), dist.get_world_size())
            partitions.append(self._partition(master, zero.sub_group_to_group_id[number], group, layout))
        return partitions

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

    def hide_partitions(self) -> None:
        """Empties the groups: DeepSpeed inserts and steps one partition after the other."""
        for group in self.optimizer.param_groups:
            group["params"] = []

    def expose_partitions(self) -> None:
        """Puts the partitions in the optimizer's parameter groups, which are empty outside DeepSpeed's step."""
        self.hide_partitions()
        for flat in self.partitions:
            self.optimizer.param_groups[flat.group]["params"].append(flat.tensor)

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
        shards: dict[str, FlatShard] = {}
        at, buffer = 0, self.zero.grad_partitions_flat_buffer
        for flat in self.partitions:
            shards |= flat.shards(buffer[at : at + flat.tensor.numel()])
            at += flat.tensor.numel()
        return shards

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
