"""What one rank holds of a tensor: all of it, a DTensor's part, a flat slice, or any of these of a cut tensor.

A checkpoint stores every tensor under its name in its native shape, whoever wrote it. So each rank has to say which
rectangular boxes of a tensor it holds. A flat slice ``[start, stop)`` of a row-major tensor, which is what ZeRO's
partition gives a rank, is at most ``2 * ndim - 1`` such boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlo_framework.cuts import Cut


class Box(NamedTuple):
    """A rectangular part of a tensor.

    Attributes:
        offsets: where it starts, an index a dim.
        sizes: how far it goes, a length a dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box; a scalar's box has one."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class FlatShard:
    """Elements ``start`` to ``start + data.numel()`` of a tensor of ``shape``, in row-major order.

    Attributes:
        data: what this rank holds, 1-D; the memory itself, not a copy; empty if the rank holds nothing of it.
        shape: the whole tensor's.
        start: the first element's index in the flattened tensor.
    """

    data: Tensor
    shape: torch.Size
    start: int

    def __post_init__(self) -> None:
        assert self.data.ndim == 1
        assert 0 <= self.start <= self.start + self.data.numel() <= self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The elements' type."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Where the rank's elements lie."""
        return self.data.device

    def detach(self) -> FlatShard:
        """Returns the same elements, outside autograd."""
        return FlatShard(self.data.detach(), self.shape, self.start)

    def clone(self) -> FlatShard:
        """Returns a copy of this rank's elements."""
        return FlatShard(self.data.clone(), self.shape, self.start)


@dataclass(frozen=True)
class CutShard:
    """What a rank holds of a tensor that tensor parallelism has cut, and sharding has perhaps divided further.

    Attributes:
        part: what the rank holds of its part.
        cut: which part of the tensor that is.
    """

    part: Tensor | FlatShard
    cut: Cut

    @property
    def shape(self) -> torch.Size:
        """The whole tensor's."""
        return self.cut.whole_shape(self.part.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The elements' type."""
        return self.part.dtype

    @property
    def device(self) -> torch.device:
        """Where the rank's elements lie."""
        return self.part.device

    def detach(self) -> CutShard:
        """Returns the same elements, outside autograd."""
        return CutShard(self.part.detach(), self.cut)

    def clone(self) -> CutShard:
        """Returns a copy of this rank's elements."""
        return CutShard(self.part.clone(), self.cut)


#: What a state dict of a sharded run may hold under a name.
Shard = Tensor | FlatShard | CutShard


def with_cut(held: Shard, cut: Cut | None) -> Shard:
    """Returns what a rank holds of a tensor together with the cut that it is a part of, where there is one."""
    return held if cut is None or isinstance(held, CutShard) else CutShard(held, cut)


def flat_slice_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Returns the boxes, in row-major order, that together are elements ``[start, stop)`` of a row-major tensor."""
    return list(_slice_boxes(tuple(shape), start, stop))


def _slice_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
    elif first == last:
        for box in _slice_boxes(shape[1:], start - first * row, stop - first * row):
            yield Box((first, *box.offsets), (1, *box.sizes))
    else:
        # An unfinished row at the start, whole rows in the middle, an unfinished row at the end.
        whole_from = first if start == first * row else first + 1
        whole_to = last + 1 if stop == (last + 1) * row else last
        if whole_from > first:
            for box in _slice_boxes(shape[1:], start - first * row, row):
                yield Box((first, *box.offsets), (1, *box.sizes))
        if whole_to > whole_from:
            yield Box((whole_from, *(0 for _ in shape[1:])), (whole_to - whole_from, *shape[1:]))
        if whole_to <= last:
            for box in _slice_boxes(shape[1:], 0, stop - last * row):
                yield Box((last, *box.offsets), (1, *box.sizes))


def held_boxes(shard: Shard) -> list[tuple[Box, Tensor]]:
    """Returns the boxes of a tensor that this rank holds, each with its elements.

    The elements are views of the rank's memory (shaped as the box), so that writing to them fills the shard.

    Args:
        shard: a plain tensor (all of it), a DTensor of any placements but partial ones, a flat slice, or one of these
            of a part that is cut out of the tensor.
    """
    if isinstance(shard, CutShard):
        return [whole for box, view in held_boxes(shard.part) for whole in _in_whole(shard.cut, box, view)]
    if isinstance(shard, FlatShard):
        held, boxes = [], flat_slice_boxes(tuple(shard.shape), shard.start, shard.start + shard.data.numel())
        at = 0
        for box in boxes:
            held.append((box, shard.data[at : at + box.numel].view(box.sizes)))
            at += box.numel
        return held
    if isinstance(shard, DTensor):
        # DTensor's side of the protocol of torch.distributed.checkpoint; it knows strided and uneven shards.
        chunks = shard.__create_chunk_list__()
        local = shard.to_local()
        if not chunks or local.numel() == 0:
            return []
        assert len(chunks) == 1
        assert tuple(chunks[0].sizes) == tuple(local.shape)
        return [(Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)), local)]
    return [(Box((0,) * shard.ndim, tuple(shard.shape)), shard)]


def _in_whole(cut: Cut, box: Box, view: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yields what a box of a part is in the whole tensor: a box for each run of the cut that it touches."""
    dim = cut.dim
    for at, first, count in cut.overlaps(box.offsets[dim], box.sizes[dim]):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = first, count
        yield Box(tuple(offsets), tuple(sizes)), view.narrow(dim, at - box.offsets[dim], count)


def overlap(one: Box, other: Box) -> Box | None:
    """Returns the box that two boxes of one tensor share; None if they share nothing."""
    offsets = tuple(max(a, b) for a, b in zip(one.offsets, other.offsets, strict=True))
    ends = tuple(
        min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None
