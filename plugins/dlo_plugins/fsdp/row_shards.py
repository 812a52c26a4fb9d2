"""Optimizer shards under FSDP: this rank's rows of each parameter, or full tensors that it owns.

FSDP2's parameters are DTensors, which an optimizer can step. But each operation on them goes through Python, one tensor
at a time (AdamW over 150 small tensors: 99 ms instead of 14 ms, torch 2.15 on a CPU). An optimizer that needs full
tensors then communicates in each of its operations, if they are defined on DTensors at all: torch's Adafactor raises,
and its Muon, which iterates in bf16, is half a percent off. So optimizers step plain tensors, in two ways
(:mod:`dlo_plugins.sharding.optimizer_shards`): elementwise optimizers step the rank's rows in place; others step full
tensors, which are assigned to the ranks that share a copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.local_memory import local_tensor
from dlo_framework.shards import FlatShard
from dlo_plugins.sharding.flat_slices import FlatSlice
from dlo_plugins.sharding.optimizer_shards import ElementwiseShard, concat


class RowPartition:
    """Partition of parameters by rows, as FSDP2 shards them; replicated scalars belong to the first rank.

    Args:
        shapes: Shapes of the full parameters.
        ranks: Number of ranks that share them.
    """

    def __init__(self, shapes: list[torch.Size], ranks: int) -> None:
        self.shapes, self.ranks = shapes, ranks

    def pieces(self, rank: int) -> list[FlatSlice]:
        """Returns a rank's pieces, in the order of the parameters."""
        found, offset = [], 0
        for number, shape in enumerate(self.shapes):
            start, length = row_range(shape, self.ranks, rank)
            if length:
                found.append(FlatSlice(number, start, length, offset))
                offset += length
        return found


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


class RowGroup:
    """Parameters of one dtype, by rows: a :class:`~dlo_plugins.sharding.optimizer_shards.ParamGroup`.

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
        self.dtype, self.step_device = self.parameters[0].dtype, local_tensor(self.parameters[0]).device
        self.partition = RowPartition([parameter.shape for parameter in self.parameters], communicator.size)
        held = self.partition.pieces(communicator.rank)
        self.owned = [piece.parameter for piece in held]
        self.pieces = [
            FlatShard(
                self._rows(self.parameters[piece.parameter], piece),
                self.parameters[piece.parameter].shape,
                piece.start,
            )
            for piece in held
        ]
        self._held = held
        self._buffer: Tensor | None = None

    @staticmethod
    def _rows(tensor: Tensor, piece: FlatSlice) -> Tensor:
        """Returns this rank's rows of a parameter or a gradient in one dim, a view of it."""
        flat = local_tensor(tensor).view(-1)
        return flat if isinstance(tensor, DTensor) else flat[piece.start : piece.start + piece.length]

    def load_params(self) -> None:
        """Frees the flat copy, so that its next use has the parameters' present values."""
        self._buffer = None

    def store_step(self) -> None:
        """Does nothing, because optimizers step the parameters' own memory, or the flat copy."""

    def stepped_pieces(self) -> list[FlatShard]:
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
            self._buffer = concat([piece.data for piece in self.pieces], self.dtype, self.step_device)
        return self._buffer

    @property
    def gradient(self) -> Tensor | None:
        """Flat copy of this rank's gradients, with zeros for parameters that have none."""
        if all(parameter.grad is None for parameter in self.parameters):
            return None
        parts = [
            gradient if gradient.numel() else torch.zeros_like(piece.data)
            for piece, gradient in zip(self.pieces, self.piece_gradients(), strict=True)
        ]
        return concat(parts, self.dtype, self.step_device)

    @torch.no_grad()
    def all_gather_params(self) -> None:
        """Writes a flat copy back to the parameters, and broadcasts scalars, which the first rank has stepped."""
        if self._buffer is not None:
            for piece, held in zip(self.partition.pieces(self.communicator.rank), self.pieces, strict=True):
                held.data.copy_(self._buffer[piece.offset : piece.offset + piece.length])
            self._buffer = None
        for parameter in self.parameters:
            if parameter.ndim == 0:
                self.communicator.broadcast(parameter.data)
        if self.communicator.size > 1 and not any(isinstance(one, DTensor) for one in self.parameters):
            self._all_gather_rows()

    def _all_gather_rows(self) -> None:
        """Gives each rank the others' rows, where all have full parameters."""
        ranks = range(self.communicator.size)
        held = [self.partition.pieces(rank) for rank in ranks]
        own = concat([piece.data for piece in self.pieces], self.dtype, self.step_device)
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
