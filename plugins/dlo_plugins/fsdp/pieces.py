"""What optimizers step under FSDP: this rank's memory of each parameter, or whole tensors that it owns.

FSDP2's parameters are DTensors, and an optimizer can step those. But each of their operations goes through Python, one
tensor at a time (AdamW over 150 small tensors: 99 ms for 14 ms, torch 2.15 on a CPU), and an optimizer that needs
whole tensors then communicates for each of its operations, if they are defined on DTensors at all: torch's Adafactor
raises, and its Muon, which iterates in bf16, comes out half a percent off. So optimizers step plain tensors, in the two
ways of ZeRO (:mod:`dlo_plugins.zero.shares`): elementwise ones the rows that the rank holds, in place; others whole
tensors, dealt out to the ranks that share a copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.checkpoint import FlatShard
from dlo_framework.checkpoint.pieces import Piece
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.held import local
from dlo_plugins.zero.shares import PieceShare, TensorShare


class RowPartition:
    """Parameters of which each rank holds a run of rows, as FSDP2 cuts them; scalars, which all hold, are the first's.

    Args:
        shapes: of the parameters.
        ranks: how many share them.
    """

    def __init__(self, shapes: list[torch.Size], ranks: int) -> None:
        self.shapes, self.ranks = shapes, ranks

    def pieces(self, rank: int) -> list[Piece]:
        """Returns what a rank holds, in the order of the parameters."""
        found, offset = [], 0
        for number, shape in enumerate(self.shapes):
            start, length = rows(shape, self.ranks, rank)
            if length:
                found.append(Piece(number, start, length, offset))
                offset += length
        return found


def rows(shape: torch.Size, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the first element and the number of elements of a row-major tensor that a rank holds.

    As ``torch.chunk`` has it: each rank has the same number of rows, rounded up, as long as there are any.
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
    """Parameters of one dtype, as :mod:`dlo_plugins.zero.shares` sees them: a flat run of what this rank holds.

    Args:
        named: the sharded parameters by name.
        communicator: the ranks that share a copy of the model.
        device: where they compute.

    Attributes:
        pieces: this rank's run of each parameter that it holds any of; their memory is the parameters' own.
        home: where the shards live.
    """

    keep_whole = False

    def __init__(self, named: dict[str, nn.Parameter], communicator: Communicator, device: torch.device) -> None:
        self.names, self.parameters = list(named), list(named.values())
        self.communicator, self.device = communicator, device
        self.dtype, self.home = self.parameters[0].dtype, local(self.parameters[0]).device
        self.partition = RowPartition([parameter.shape for parameter in self.parameters], communicator.size)
        held = self.partition.pieces(communicator.rank)
        self.owned = [piece.parameter for piece in held]
        self.pieces = [
            FlatShard(
                local(self.parameters[piece.parameter]).view(-1), self.parameters[piece.parameter].shape, piece.start
            )
            for piece in held
        ]
        self._buffer: Tensor | None = None

    def bring(self) -> None:
        """Does nothing: what optimizers step is the parameters' own memory."""

    def stepped_pieces(self) -> list[FlatShard]:
        """Returns what optimizers step: the pieces themselves."""
        return self.pieces

    def piece_gradients(self) -> list[Tensor]:
        """Returns the gradient of each piece, the parameters' own memory; empty where there is none."""
        gradients = [self.parameters[number].grad for number in self.owned]
        return [torch.empty(0) if gradient is None else local(gradient).view(-1) for gradient in gradients]

    # --- for optimizers of whole tensors -------------------------------------------------------------------

    @property
    def shard(self) -> Tensor:
        """What this rank holds, flat: a copy, which :meth:`publish` writes back and :meth:`drop` gives up."""
        if self._buffer is None:
            self._buffer = _joined([piece.data for piece in self.pieces], self.dtype, self.home)
        return self._buffer

    @property
    def gradient(self) -> Tensor | None:
        """This rank's part of the gradients, flat: a copy, with zeros for parameters that have none."""
        if all(parameter.grad is None for parameter in self.parameters):
            return None
        parts = [
            gradient if gradient.numel() else torch.zeros_like(piece.data)
            for piece, gradient in zip(self.pieces, self.piece_gradients(), strict=True)
        ]
        return _joined(parts, self.dtype, self.home)

    @torch.no_grad()
    def publish(self) -> None:
        """Brings the flat copy's values into the parameters; all ranks have the scalars' from the first."""
        assert self._buffer is not None
        for piece, held in zip(self.partition.pieces(self.communicator.rank), self.pieces, strict=True):
            held.data.copy_(self._buffer[piece.offset : piece.offset + piece.length])
        self.drop()
        for parameter in self.parameters:
            if parameter.ndim == 0:
                self.communicator.broadcast(parameter.data)

    def drop(self) -> None:
        """Gives the flat copy up."""
        self._buffer = None


class RowShare(PieceShare):
    """The rows that this rank holds, for optimizers that treat each element by itself; stepped in place."""

    def give_gradients(self, used: Iterable[str]) -> None:
        """Gives the stand-ins the parameters' gradients; it is the same memory.

        Whoever calls the module's own ``zero_grad``, Lightning before a validation, has dropped those of all
        optimizers.
        """
        used = set(used)
        for group in self.groups:
            for number, gradient in zip(group.owned, group.piece_gradients(), strict=True):
                if group.names[number] in used:
                    stand_in = self.stand_ins[group.names[number]]
                    stand_in.grad = gradient.view_as(stand_in) if gradient.numel() else None

    def publish(self) -> None:
        """Brings scalars, which the first rank has stepped, to the others."""
        for group in self.groups:
            for parameter in group.parameters:
                if parameter.ndim == 0:
                    self.communicator.broadcast(parameter.data)


class WholeShare(TensorShare):
    """Whole tensors, for optimizers that need a tensor's norm, rows or singular values."""

    def bring_parameters(self) -> None:
        """Fills the stand-ins with the parameters' values."""
        groups: Any = self.groups
        for group in groups:
            group.drop()
        super().bring_parameters()


def _joined(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat([part.to(device) for part in parts]) if parts else torch.empty(0, dtype=dtype, device=device)


def groups_of(
    optimizer: Optimizer, names: dict[int, str], communicator: Communicator, device: torch.device
) -> list[Any]:
    """Returns an optimizer's parameters as groups, one for each dtype; whole numbers, which none can step, left out.

    Args:
        optimizer: as configured on sharded parameters.
        names: of the parameters that this rank holds, by id.
        communicator: the ranks that share a copy of the model.
        device: where they compute.
    """
    by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                continue  # Another pipeline stage's.
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            by_dtype.setdefault(parameter.dtype, {})[names[id(parameter)]] = parameter
    return [RowGroup(named, communicator, device) for named in by_dtype.values()]
