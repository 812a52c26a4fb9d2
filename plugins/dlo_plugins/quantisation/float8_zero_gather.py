"""All-gathers of ZeRO's stage 3 in float8: weights of layers with float8 products travel as one byte an element.

As with FSDP (:mod:`dlo_plugins.quantisation.float8_gather`), a weight has one scale, of its largest value over all
ranks, and the gathered weight is the rounded one in the dtype in which parameters are gathered. A flat group has other
parameters too, such as norms. So each rank packs its segment into bytes, those of the others unchanged, and unpacks all
ranks' bytes into the full buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_framework.distributed.collectives import Pending
from dlo_plugins.zero.flat_group import FlatGroup
from dlo_plugins.zero.zero_engine import ZeroEngine

#: Multiple of bytes that each rank sends.
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Piece:
    """Elements of the full buffer that a rank sends.

    Attributes:
        parameter: Index of the parameter in its group.
        start: First element in the full buffer.
        length: Number of elements.
        place: First byte in the rank's bytes.
    """

    parameter: int
    start: int
    length: int
    place: int


class Float8Segments:
    """Bytes of a flat group's segments; a group's ``encoding``.

    Args:
        group: Group of stage 3.
        numbers: Indices of the parameters that travel in float8.

    Attributes:
        scales: Scale of each of these parameters, by its index.
    """

    def __init__(self, group: FlatGroup, numbers: list[int]) -> None:
        self.group, self.numbers = group, numbers
        self.scales: dict[int, Tensor] = {}
        size, coded = group.gathered_dtype.itemsize, set(numbers)
        self._pieces: list[list[_Piece]] = []
        self._bytes = 0
        for rank in range(group.communicator.size):
            place, found = 0, []
            # Those that are not rounded come first, aligned to their dtype.
            runs = sorted(group.partition.pieces(rank), key=lambda run: run.parameter in coded)
            for run in runs:
                start = rank * group.partition.segment + run.offset
                found.append(_Piece(run.parameter, start, run.length, place))
                place += run.length * (1 if run.parameter in coded else size)
            self._pieces.append(found)
            self._bytes = max(self._bytes, -(-place // _ALIGNMENT) * _ALIGNMENT)

    def largest(self) -> list[Tensor]:
        """Returns the largest value of this rank's elements of each of these parameters."""
        group = self.group
        if group.shard_device != group.device:
            group.finish_copies()  # The host reads the shard.
        own = {number: piece.data for number, piece in zip(group.owned, group.pieces, strict=True)}
        none = torch.zeros((), device=group.shard_device)
        found = [own[number].abs().amax().float() if number in own else none for number in self.numbers]
        return [value.to(group.device, non_blocking=True) for value in found]

    @torch.no_grad()
    def all_gather(self, full: Tensor) -> Pending:
        """Gathers all ranks' segments into the full buffer, of which each rank has filled its own."""
        ranks = self.group.communicator
        sent = torch.zeros(ranks.size, self._bytes, dtype=torch.uint8, device=full.device)
        for piece in self._pieces[ranks.rank]:
            values = full[piece.start : piece.start + piece.length]
            self._view(sent[ranks.rank], piece).copy_(self._rounded(piece, values))
        pending = ranks.all_gather(sent.view(-1))

        @torch.no_grad()
        def unpack() -> Tensor:
            pending.wait()
            if sent.device.type != "cpu":  # An offloaded shard is gathered in the stream of its copy.
                sent.record_stream(torch.get_device_module(sent.device).current_stream(sent.device))
            for rank, pieces in enumerate(self._pieces):
                for piece in pieces:
                    values, scale = self._view(sent[rank], piece), self.scales.get(piece.parameter)
                    values = values if scale is None else values.float() / scale
                    full[piece.start : piece.start + piece.length].copy_(values)
            return full

        return Pending([], unpack)

    def _rounded(self, piece: _Piece, values: Tensor) -> Tensor:
        from torchao.float8.config import e4m3_dtype
        from torchao.float8.float8_utils import to_fp8_saturated

        scale = self.scales.get(piece.parameter)
        return values if scale is None else to_fp8_saturated(values.float() * scale, e4m3_dtype)

    def _view(self, sent: Tensor, piece: _Piece) -> Tensor:
        """Returns a piece's elements in a rank's bytes."""
        from torchao.float8.config import e4m3_dtype

        dtype = e4m3_dtype if piece.parameter in self.scales else self.group.gathered_dtype
        return sent[piece.place : piece.place + piece.length * dtype.itemsize].view(dtype)


class Float8ZeroGather:
    """Gathers of some weights in float8 by a ZeRO engine; begins by :meth:`refresh`.

    Args:
        engine: Engine of stage 3.
        names: Names of the weights.
    """

    def __init__(self, engine: ZeroEngine, names: set[str]) -> None:
        self._engine = engine
        self._segments = []
        for group in engine.groups:
            numbers = [number for number, name in enumerate(group.names) if name in names]
            if numbers:
                self._segments.append(Float8Segments(group, numbers))

    def __len__(self) -> int:
        return sum(len(segments.numbers) for segments in self._segments)

    @torch.no_grad()
    def refresh(self) -> None:
        """Computes the scales of the current weights; all ranks call it before they use new ones."""
        from torchao.float8.config import e4m3_dtype
        from torchao.float8.float8_utils import amax_to_scale

        found = torch.stack([value for segments in self._segments for value in segments.largest()])
        largest = iter(self._engine.communicator.maximum(found).unbind())
        for segments in self._segments:
            dtype = segments.group.gathered_dtype
            # The product finds the scale in the gathered weight, which is in this dtype.
            segments.scales = {n: amax_to_scale(next(largest).to(dtype), e4m3_dtype) for n in segments.numbers}
            segments.group.encoding = segments

    def remove(self) -> None:
        """Makes the engine gather the weights as before."""
        for segments in self._segments:
            segments.group.encoding = None
        self._segments = []
