"""Optimizer shards under FSDP: this rank's rows of each parameter, or full tensors that it owns.

Rows are along the dim that FSDP2 shards: the first, except for stacks of matrices that it would shard unevenly.

FSDP2's parameters are DTensors, which an optimizer can step. But each operation on them goes through Python, one tensor
at a time (AdamW over 150 small tensors: 99 ms instead of 14 ms, torch 2.15 on a CPU). An optimizer that needs full
tensors then communicates in each of its operations, if they are defined on DTensors at all: torch's Adafactor raises,
and its Muon, which iterates in bf16, is half a percent off. So optimizers step plain tensors, in two ways
(:mod:`dlo_plugins.parallel.optimizer_shards`): elementwise optimizers step the rank's rows in place; others step full
tensors, which are assigned to the ranks that share a copy of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.optim import Optimizer

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.local_memory import local_tensor
from dlo_framework.shards import FlatShard, Shard, SlicedShard, TensorSlice, make_equal_slice
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.parallel.flat_slices import FlatSlice, assign_balanced
from dlo_plugins.parallel.optimizer_shards import ElementwiseShard, FullTensorShard, OptimizerShard, concat, flat_piece

#: Largest shard along the first dim of a stack, in fair shares, before another dim is sharded.
MOST_UNEVEN = 1.02


class RowPartition:
    """Partition of parameters by rows, as FSDP2 shards them; replicated scalars belong to the first rank.

    Args:
        shapes: Shapes of the full parameters.
        ranks: Number of ranks that share them.
        dims: Dim of each parameter that is sharded. A piece is a range of the tensor in which it is the first dim.
    """

    def __init__(self, shapes: list[torch.Size], ranks: int, dims: list[int]) -> None:
        self.shapes, self.ranks = [_first(shape, dim) for shape, dim in zip(shapes, dims, strict=True)], ranks

    def pieces(self, rank: int) -> list[FlatSlice]:
        """Returns a rank's pieces, in the order of the parameters."""
        pieces, offset = [], 0
        for number, shape in enumerate(self.shapes):
            start, length = row_range(shape, self.ranks, rank)
            if length:
                pieces.append(FlatSlice(number, start, length, offset))
                offset += length
        return pieces


def row_range(shape: torch.Size, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the index of the first element, and the number of elements, of a rank's rows of a row-major tensor.

    The rows are those of ``torch.chunk``: ranks get the same number of rows, rounded up, until none are left.
    """
    if len(shape) == 0:
        return 0, int(rank == 0)
    if shape.numel() == 0:
        return 0, 0
    inner = shape.numel() // shape[0]
    most = -(-shape[0] // ranks)
    first, last = min(rank * most, shape[0]), min((rank + 1) * most, shape[0])
    return first * inner, (last - first) * inner


def shard_dim(shape: torch.Size, ranks: int, is_expert: bool = False) -> int:
    """Returns the dim along which a parameter is sharded.

    It is the first, except for a stack of matrices, such as those of experts, of which the ranks would get uneven
    shares: then it is the first dim that they divide evenly, if there is one. FSDP2 (torch 2.11 to 2.15) shards other
    dims than the first evenly only.

    Args:
        shape: Shape of the parameter that the ranks share.
        ranks: Number of ranks.
        is_expert: Whether it is of experts that `ep` divides, whose biases are stacks too.
    """
    is_stack = len(shape) == 3 or (is_expert and len(shape) > 1)
    if not is_stack or (shape[0] == 1 and not is_expert) or -(-shape[0] // ranks) * ranks <= MOST_UNEVEN * shape[0]:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), 0)


def _first(shape: torch.Size, dim: int) -> torch.Size:
    """Returns a shape with a dim moved to the front."""
    return torch.Size([shape[dim], *shape[:dim], *shape[dim + 1 :]]) if dim else shape


def _dim_of(parameter: Tensor) -> int:
    """Returns the dim along which FSDP2 has sharded a parameter; 0 for a full tensor."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return next((placement.dim for placement in placements if isinstance(placement, ShardPlacement)), 0)


class RowGroup:
    """Parameters of one dtype, by rows: a :class:`~dlo_plugins.parallel.optimizer_shards.ParamGroup`.

    Args:
        named: Sharded parameters by name.
        communicator: Communicator of the ranks that share a copy of the model.
        device: Device that computes.

    Attributes:
        pieces: Rows of this rank of each parameter of which it has any, flat; views of the parameters' memory.
        step_device: Device of the shards, where the optimizer steps.
    """

    keep_full = has_master_weights = False

    def __init__(self, named: dict[str, nn.Parameter], communicator: Communicator, device: torch.device) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.communicator, self.device = communicator, device
        self.dtype = self.parameters[0].dtype
        # With offload, shards are in CPU memory, and scalars, which are not sharded, on the device.
        shards = [parameter for parameter in self.parameters if isinstance(parameter, DTensor)]
        self.step_device = local_tensor((shards or self.parameters)[0]).device
        self._dims = [_dim_of(parameter) for parameter in self.parameters]
        shapes = [parameter.shape for parameter in self.parameters]
        self.partition = RowPartition(shapes, communicator.size, self._dims)
        held = self.partition.pieces(communicator.rank)
        self.owned = [piece.parameter for piece in held]
        self.pieces = [self._piece(piece) for piece in held]
        self._held = held
        self._buffer: Tensor | None = None

    def _piece(self, piece: FlatSlice) -> FlatShard | SlicedShard:
        """Returns a piece as a shard of its parameter."""
        parameter, dim = self.parameters[piece.parameter], self._dims[piece.parameter]
        rows = self._rows(parameter, piece)
        if not dim:
            return FlatShard(rows, parameter.shape, piece.start)
        ranks = self.communicator
        cut = make_equal_slice(dim, parameter.shape[dim], ranks.size, ranks.rank)
        return SlicedShard(FlatShard(rows, cut.slice_shape(parameter.shape), 0), cut)

    def _in_order(self, piece: FlatSlice, rows: Tensor) -> Tensor:
        """Returns a piece's elements, which have the order of the parameter's memory, in that of the partition."""
        dim = self._dims[piece.parameter]
        if not dim:
            return rows
        return rows.view(self._local_shape(piece)).movedim(dim, 0).flatten()

    def _local_shape(self, piece: FlatSlice) -> torch.Size:
        return local_tensor(self.parameters[piece.parameter]).shape

    def in_partition_order(self, number: int, full: Tensor) -> Tensor:
        """Returns a full tensor of a parameter's shape, flat, in the order in which the partition's pieces cut it."""
        dim = self._dims[number]
        return full.view(self.parameters[number].shape).movedim(dim, 0).flatten() if dim else full.flatten()

    def full_tensor(self, number: int, flat: Tensor) -> Tensor:
        """Returns the full tensor from :meth:`in_partition_order`."""
        dim = self._dims[number]
        tensor = flat.view(_first(self.parameters[number].shape, dim))
        return tensor.movedim(0, dim).contiguous() if dim else tensor

    @staticmethod
    def _rows(tensor: Tensor, piece: FlatSlice) -> Tensor:
        """Returns this rank's rows of a parameter or a gradient in one dim, a view of it."""
        flat = local_tensor(tensor).view(-1)
        return flat if isinstance(tensor, DTensor) else flat[piece.start : piece.start + piece.length]

    def load_params(self) -> bool:
        """Frees the flat copy, so that its next use has the parameters' present values; returns False."""
        self._buffer = None
        return False

    def store_step(self) -> None:
        """Does nothing, because optimizers step the parameters' own memory, or the flat copy."""

    def stepped_pieces(self) -> list[FlatShard | SlicedShard]:
        """Returns the pieces that optimizers step, the parameters' own memory."""
        return self.pieces

    def piece_gradients(self) -> list[Tensor]:
        """Returns the gradient of each piece, a view of the parameter's; empty where there is none."""
        gradients = [self.parameters[piece.parameter].grad for piece in self._held]
        return [
            torch.empty(0) if gradient is None else self._rows(gradient, piece)
            for gradient, piece in zip(gradients, self._held, strict=True)
        ]

    # --- for optimizers of full tensors --------------------------------------------------------------------

    @property
    def shard(self) -> Tensor:
        """Flat copy of this rank's pieces, which :meth:`all_gather_params` writes back and frees."""
        if self._buffer is None:
            self._buffer = concat(self._ordered(self._values()), self.dtype, self.step_device)
        return self._buffer

    @property
    def gradient(self) -> Tensor | None:
        """Flat copy of this rank's gradients, with zeros for parameters that have none."""
        if all(parameter.grad is None for parameter in self.parameters):
            return None
        parts = [
            gradient if gradient.numel() else torch.zeros_like(values)
            for values, gradient in zip(self._values(), self.piece_gradients(), strict=True)
        ]
        return concat(self._ordered(parts), self.dtype, self.step_device)

    def _values(self) -> list[Tensor]:
        return [flat_piece(piece).data for piece in self.pieces]

    def _ordered(self, parts: list[Tensor]) -> list[Tensor]:
        return [self._in_order(piece, part) for piece, part in zip(self._held, parts, strict=True)]

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """Writes a flat copy back to the parameters, and broadcasts scalars, which the first rank has stepped."""
        if self._buffer is not None:
            for piece, values in zip(self._held, self._values(), strict=True):
                stepped, dim = self._buffer[piece.offset : piece.offset + piece.length], self._dims[piece.parameter]
                if dim:
                    shape = self._local_shape(piece)
                    stepped = stepped.view(_first(shape, dim)).movedim(0, dim).flatten()
                values.copy_(stepped)
            self._buffer = None
        for parameter in self.parameters:
            if parameter.ndim == 0:
                self.communicator.broadcast(parameter.data)
        if self.communicator.size > 1 and not any(isinstance(one, DTensor) for one in self.parameters):
            self._all_gather_rows()

    def _sent_rows(self) -> Tensor:
        """Returns this rank's rows in the dtype and on the device of the parameters, in one dim."""
        return concat(self._values(), self.dtype, self.step_device)

    def _all_gather_rows(self) -> None:
        """Gives each rank the others' rows, where all have full parameters."""
        ranks = range(self.communicator.size)
        held = [self.partition.pieces(rank) for rank in ranks]
        own = self._sent_rows()
        lengths = [sum(piece.length for piece in pieces) for pieces in held]
        received = self.communicator.exchange([own for _ in ranks], lengths)
        for pieces, rows in zip(held, received, strict=True):
            for piece in pieces:
                target = self._rows(self.parameters[piece.parameter], piece)
                target.copy_(rows[piece.offset : piece.offset + piece.length])


class RowShard(ElementwiseShard[RowGroup]):
    """Optimizer shard of elementwise optimizers: this rank's rows, stepped in place."""

    def set_grads(self, used: Iterable[str]) -> None:
        """Sets the gradients of the local parameters to views of the parameters' gradients.

        So the module's own ``zero_grad``, which Lightning calls before a validation, drops those of all optimizers.
        """
        used = set(used)
        for group in self.groups:
            for number, gradient in zip(group.owned, group.piece_gradients(), strict=True):
                if group.names[number] in used:
                    local_param = self.local_params[group.names[number]]
                    local_param.grad = gradient.view_as(local_param) if gradient.numel() else None


def make_groups(
    optimizer: Optimizer, names: dict[int, str], communicator: Communicator, device: torch.device
) -> list[RowGroup]:
    """Returns an optimizer's parameters as one group per dtype, without integers, which no optimizer can step.

    Args:
        optimizer: Optimizer of sharded parameters.
        names: Names of this rank's parameters by id.
        communicator: Communicator of the ranks that share a copy of the model.
        device: Device that computes.
    """
    by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                continue  # It belongs to another pipeline stage.
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            by_dtype.setdefault(parameter.dtype, {})[names[id(parameter)]] = parameter
    return [RowGroup(named, communicator, device) for named in by_dtype.values()]


class MasterRowGroup(RowGroup):
    """Parameters whose rows of this rank are copies, of one dtype and in one memory.

    Args:
        named: Full parameters by name.
        communicator: Communicator of the ranks that share the rows.
        device: Device that computes.
        masters: Rows of this rank by name.
    """

    has_master_weights = True

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        communicator: Communicator,
        device: torch.device,
        masters: Mapping[str, FlatShard],
    ) -> None:
        self._masters = [masters[name] for name in named]
        super().__init__(named, communicator, device)
        self.dtype, self.step_device = self._masters[0].dtype, self._masters[0].device

    def _piece(self, piece: FlatSlice) -> FlatShard:
        return self._masters[piece.parameter]

    def piece_gradients(self) -> list[Tensor]:
        """Returns the gradient of each piece, where the optimizer steps; empty where there is none."""
        return [gradient.to(self.step_device, self.dtype) for gradient in super().piece_gradients()]

    def _sent_rows(self) -> Tensor:
        rows = concat(self._values(), self.dtype, self.step_device)
        return rows.to(self.device, self.parameters[0].dtype)

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """Writes a flat copy back to the rows, and all ranks' rows to the parameters."""
        if self._buffer is not None:
            for piece, values in zip(self._held, self._values(), strict=True):
                values.copy_(self._buffer[piece.offset : piece.offset + piece.length])
            self._buffer = None
        self._all_gather_rows()


class MasterRows:
    """Master weights of a module's parameters.

    Args:
        step_device: Device of the rows, where optimizers step.
        param_dtype: Dtype with which the model computes; None for the parameters' own.

    Attributes:
        shards: Rows of this rank by parameter name; empty ones where it has none.
    """

    def __init__(self, step_device: torch.device, param_dtype: torch.dtype | None) -> None:
        self._step_device, self._param_dtype = step_device, param_dtype
        self.shards: dict[str, FlatShard] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._sharers: dict[str, Communicator] = {}

    def add(self, named: Mapping[str, nn.Parameter], sharers: Communicator) -> None:
        """Copies this rank's rows of parameters, and casts the parameters; those that have rows are left alone.

        Args:
            named: Full parameters by name.
            sharers: Communicator of the ranks that share their rows.
        """
        for name, parameter in named.items():
            if name in self.shards or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            start, length = row_range(parameter.shape, sharers.size, sharers.rank)
            rows = parameter.detach().reshape(-1)[start : start + length]
            self.shards[name] = FlatShard(rows.to(self._step_device, copy=True), parameter.shape, start)
            self._parameters[name], self._sharers[name] = parameter, sharers
            own = parameter.dtype
            if self._param_dtype not in (None, own) and parameter.is_floating_point():
                parameter.data = parameter.data.to(self._param_dtype)
                if parameter.requires_grad:
                    parameter.grad_dtype = own

    def groups(self, named: Mapping[str, nn.Parameter], device: torch.device) -> list[MasterRowGroup]:
        """Returns parameters as one group per dtype and ranks that share rows.

        Args:
            named: Parameters by name; those without rows are left out.
            device: Device that computes.
        """
        alike: dict[tuple[torch.dtype, int], dict[str, nn.Parameter]] = {}
        for name, parameter in named.items():
            if name in self.shards:
                alike.setdefault((self.shards[name].dtype, id(self._sharers[name])), {})[name] = parameter
        return [MasterRowGroup(same, self._sharers[next(iter(same))], device, self.shards) for same in alike.values()]

    def all_gather(self, device: torch.device) -> None:
        """Writes all ranks' rows to the parameters, after the rows were written from outside; a collective call."""
        for group in self.groups(self._parameters, device):
            group.all_gather_params()

    def of_state(self, module: nn.Module) -> Iterator[tuple[str, FlatShard]]:
        """Yields the names in a module's ``state_dict`` that have rows, tied ones too, and the rows."""
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) in first:
                yield plain_name(name), self.shards[first[id(value)]]


def like_gradient(parameter: Tensor) -> Tensor:
    """Returns zeros in the shape and dtype of a parameter's gradient."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype, requires_grad=False)


class JoinedTensorShard(FullTensorShard[RowGroup]):
    """Optimizer shard of full tensors that are joined from tp slices.

    Args:
        groups: Groups of the optimizer's parameters.
        communicator: Communicator of the ranks that share this rank's part of the model.
        tensor_parallel: Communicator of the tp axis; of `ep`, or of `ep` and `tp`, for experts.
        slices: This rank's slices, by parameter name.
    """

    def __init__(
        self,
        groups: list[RowGroup],
        communicator: Communicator,
        tensor_parallel: Communicator,
        slices: dict[str, TensorSlice],
    ) -> None:
        self.tensor_parallel, self.slices = tensor_parallel, slices
        self._slices_of: list[dict[str, TensorSlice]] = [{} for _ in range(tensor_parallel.size)]
        dist.all_gather_object(self._slices_of, slices, group=tensor_parallel.group)
        super().__init__(groups, communicator)
        # Names of the sliced tensors that all tp ranks with this part of the model own together, by dtype.
        self._sliced: dict[torch.dtype, list[str]] = defaultdict(list)
        for group in groups:
            self._sliced[group.dtype] += [name for name in group.names if name in self.local_params and name in slices]
        names = [name for same in self._sliced.values() for name in same]
        owners = assign_balanced([self.full_shape(name).numel() for name in names], tensor_parallel.size)
        self._tp_owner = dict(zip(names, owners, strict=True))
        for name, owner in self._tp_owner.items():
            if owner != tensor_parallel.rank:
                del self.local_params[name]

    def full_shape(self, name: str) -> torch.Size:
        """Returns the shape of a parameter over all ranks; all tp ranks assign the same owners by its size."""
        shape = self.shapes[name]
        return self.slices[name].full_shape(shape) if name in self.slices else shape

    def _slice_shape(self, name: str, rank: int) -> torch.Size:
        return self._slices_of[rank][name].slice_shape(self.full_shape(name))

    def _owned_by(self, names: list[str], rank: int) -> list[str]:
        return [name for name in names if self._tp_owner[name] == rank]

    def _gather_owned(self, shards: dict[int, Tensor]) -> dict[str, Tensor]:
        """Returns the full tensors that this rank owns, joined over the tp axis."""
        tensors = super()._gather_owned(shards)
        device, home = self.groups[0].device, self.groups[0].step_device
        ranks = range(self.tensor_parallel.size)
        loaded = {name for group in self.groups if id(group) in shards for name in group.names}
        for dtype, names in self._sliced_of(loaded).items():
            # A slice without elements is in no shard.
            values = {name: tensors.pop(name, torch.empty(0, dtype=dtype)).to(device).flatten() for name in names}
            sent = [concat([values[name] for name in self._owned_by(names, rank)], dtype, device) for rank in ranks]
            own = self._owned_by(names, self.tensor_parallel.rank)
            lengths = [sum(self._slice_shape(name, rank).numel() for name in own) for rank in ranks]
            received = self.tensor_parallel.exchange(sent, lengths)
            at = [0] * len(ranks)
            for name in own:
                full = torch.empty(self.full_shape(name), dtype=dtype, device=device)
                for rank in ranks:
                    shape = self._slice_shape(name, rank)
                    piece = received[rank][at[rank] : at[rank] + shape.numel()].view(shape)
                    at[rank] += shape.numel()
                    self._slices_of[rank][name].write_slice(full, piece)
                tensors[name] = full.to(home)
        return tensors

    def _sliced_of(self, names: Set[str]) -> dict[torch.dtype, list[str]]:
        """Returns those of the named tensors that are sliced and that this rank's part of the model owns, by dtype."""
        by_dtype = {dtype: [name for name in same if name in names] for dtype, same in self._sliced.items()}
        return {dtype: same for dtype, same in by_dtype.items() if same}

    def _stepped_values(self, names: Set[str]) -> dict[str, Tensor]:
        """Returns this rank's slices of the stepped values, including those of other tp ranks' tensors."""
        stepped = {
            name: tensor.data for name, tensor in self.local_params.items() if name in names and name not in self.slices
        }
        device, ranks = self.groups[0].device, range(self.tensor_parallel.size)
        for dtype, same in self._sliced_of(names).items():
            own = {name: self.local_params[name].data for name in self._owned_by(same, self.tensor_parallel.rank)}
            sent = []
            for rank in ranks:
                pieces = [self._slices_of[rank][name].slice_tensor(tensor).flatten() for name, tensor in own.items()]
                sent.append(concat(pieces, dtype, device))
            mine = self.tensor_parallel.rank
            theirs = [self._owned_by(same, rank) for rank in ranks]
            lengths = [sum(self._slice_shape(name, mine).numel() for name in owned) for owned in theirs]
            received = self.tensor_parallel.exchange(sent, lengths)
            for owned, values in zip(theirs, received, strict=True):
                sizes = [self._slice_shape(name, mine).numel() for name in owned]
                stepped |= dict(zip(owned, values.split(sizes), strict=True))
        return stepped


class SeparateShards(OptimizerShard[RowGroup]):
    """Optimizer shard of tensors that several groups of ranks share, each by a shard of its own.

    Args:
        parts: Shards of full tensors, each of other parameters of the same optimizer.
    """

    def __init__(self, parts: Sequence[FullTensorShard[RowGroup]]) -> None:
        super().__init__([group for part in parts for group in part.groups], parts[0].communicator)
        self.parts = parts
        for part in parts:
            self.local_params |= part.local_params

    def _part(self, name: str) -> FullTensorShard[RowGroup]:
        return next(part for part in self.parts if name in part.shapes)

    def full_shape(self, name: str) -> torch.Size:
        """Returns the shape of a parameter, all ranks' shards together."""
        return self._part(name).full_shape(name)

    def load_params(self) -> bool:
        """Loads the shards' values into the local parameters; returns whether the user's code has written to them."""
        return sum(part.load_params() for part in self.parts) > 0

    def set_grads(self, used: Iterable[str]) -> None:
        """Sets the gradients of the local parameters; unused parameters keep None."""
        used = set(used)
        for part in self.parts:
            part.set_grads(used)

    def all_gather_params(self) -> None:
        """Copies the stepped values into the shards, and starts their all-gather."""
        for part in self.parts:
            part.all_gather_params()

    def as_shard(self, name: str, value: Tensor) -> Shard:
        """Returns a state tensor of a parameter as a shard of the full one, for checkpoints."""
        return self._part(name).as_shard(name, value)

    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns an uninitialised shard for a state tensor of a full shape."""
        return self._part(name).empty_shard(name, shape, dtype)
