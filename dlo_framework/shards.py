"""Shards of a tensor on one rank, as boxes: a full tensor, a DTensor, a flat slice, or one of these of a TP slice.

A checkpoint stores every tensor under its name in its full shape, whatever the strategy. So each rank reports which
rectangular boxes of a tensor it holds. A flat slice ``[start, stop)`` of a row-major tensor, such as a rank's slice in
ZeRO's partition, is at most ``2 * ndim - 1`` such boxes.

Tensor parallelism slices a parameter once, along one dim, and for good: the module then holds a smaller parameter. A
:class:`TensorSlice` records which slice of the full tensor it is. A fused projection of queries, keys and values is
sliced in three places, so a slice is several ranges of indices, not one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlo_framework.errors import DloError


class Box(NamedTuple):
    """Rectangular slice of a tensor.

    Attributes:
        offsets: First index along each dim.
        sizes: Length along each dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements in the box; a scalar's box has one."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class FlatShard:
    """Elements ``start`` to ``start + data.numel()`` of a tensor of ``shape``, in row-major order.

    Attributes:
        data: Elements on this rank, 1-D; the memory itself, not a copy; empty if the rank holds none.
        shape: Shape of the full tensor.
        start: Index of the first element in the flattened tensor.
    """

    data: Tensor
    shape: torch.Size
    start: int

    def __post_init__(self) -> None:
        assert self.data.ndim == 1
        assert 0 <= self.start <= self.start + self.data.numel() <= self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rank's elements."""
        return self.data.device

    def detach(self) -> FlatShard:
        """Returns the same elements, outside autograd."""
        return FlatShard(self.data.detach(), self.shape, self.start)

    def clone(self) -> FlatShard:
        """Returns a copy of this rank's elements."""
        return FlatShard(self.data.clone(), self.shape, self.start)


@dataclass(frozen=True)
class SlicedShard:
    """Shard of a tensor that tensor or expert parallelism has sliced, and that FSDP or ZeRO may shard further.

    A shard along another dim than the first is a slice too, perhaps of a slice.

    Attributes:
        shard: Rank's shard of the slice.
        tensor_slice: Slice of the full tensor.
    """

    shard: Tensor | FlatShard | SlicedShard
    tensor_slice: TensorSlice

    @property
    def shape(self) -> torch.Size:
        """The shape of the full tensor."""
        return self.tensor_slice.full_shape(self.shard.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.shard.dtype

    @property
    def device(self) -> torch.device:
        """The device of the rank's elements."""
        return self.shard.device

    def detach(self) -> SlicedShard:
        """Returns the same elements, outside autograd."""
        return SlicedShard(self.shard.detach(), self.tensor_slice)

    def clone(self) -> SlicedShard:
        """Returns a copy of this rank's elements."""
        return SlicedShard(self.shard.clone(), self.tensor_slice)


#: Value of a name in a sharded run's state dict.
Shard = Tensor | FlatShard | SlicedShard


def attach_slice(held: Shard, cut: TensorSlice | None) -> Shard:
    """Returns a rank's shard together with the TP slice that it belongs to, if there is one."""
    return held if cut is None or isinstance(held, SlicedShard) else place_in_slice(held, cut)


def place_in_slice(held: Shard, cut: TensorSlice) -> SlicedShard:
    """Returns a shard of a slice, which may itself be in a slice, as a shard of the full tensor."""
    if cut.inner is not None:
        held, cut = place_in_slice(held, cut.inner), replace(cut, inner=None)
    return SlicedShard(held, cut)


def local_data(shard: Shard) -> Tensor:
    """Returns the tensor that holds a shard's elements on this rank: its own memory, outside autograd."""
    if isinstance(shard, SlicedShard):
        return local_data(shard.shard)
    if isinstance(shard, FlatShard):
        return shard.data.detach()
    return (shard.to_local() if isinstance(shard, DTensor) else shard).detach()


def shard_maker(shard: Shard) -> Callable[[Tensor], Shard]:
    """Returns a function that makes a shard with the place of a given one, from other elements.

    The elements have the shape of :func:`local_data` and any dtype. The given shard's memory is not kept.
    """
    if isinstance(shard, SlicedShard):
        inner, cut = shard_maker(shard.shard), shard.tensor_slice

        return lambda data: SlicedShard(inner(data), cut)
    if isinstance(shard, FlatShard):
        shape, start = shard.shape, shard.start
        return lambda data: FlatShard(data, shape, start)
    if isinstance(shard, DTensor):
        mesh, placements, full, stride = shard.device_mesh, shard.placements, shard.shape, shard.stride()

        def make_dtensor(data: Tensor) -> Shard:
            return DTensor.from_local(data, mesh, placements, run_check=False, shape=full, stride=stride)

        return make_dtensor
    return lambda data: data


def flat_slice_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Returns the boxes, in row-major order, that tile the elements ``[start, stop)`` of a row-major tensor."""
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
        # An incomplete row at the start, full rows in the middle, an incomplete row at the end.
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

    The elements are views of the rank's memory, in the shape of the box, so that writing to them fills the shard.

    Args:
        shard: Plain tensor (the full one), DTensor of any placements but ``Partial``, flat slice, or one of these of a
            TP slice.
    """
    if isinstance(shard, SlicedShard):
        return [
            whole for box, view in held_boxes(shard.shard) for whole in _in_full_tensor(shard.tensor_slice, box, view)
        ]
    if isinstance(shard, FlatShard):
        held, boxes = [], flat_slice_boxes(tuple(shard.shape), shard.start, shard.start + shard.data.numel())
        at = 0
        for box in boxes:
            held.append((box, shard.data[at : at + box.numel].view(box.sizes)))
            at += box.numel
        return held
    if isinstance(shard, DTensor):
        # DTensor's side of the protocol of torch.distributed.checkpoint; it supports strided and uneven shards.
        chunks = shard.__create_chunk_list__()
        local = shard.to_local()
        if not chunks or local.numel() == 0:
            return []
        assert len(chunks) == 1
        assert tuple(chunks[0].sizes) == tuple(local.shape)
        return [(Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes)), local)]
    return [(Box((0,) * shard.ndim, tuple(shard.shape)), shard)]


def _in_full_tensor(cut: TensorSlice, box: Box, view: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yields a slice's box in coordinates of the full tensor: one box for each run of the slice that it overlaps."""
    dim = cut.dim
    for at, first, count in cut.overlaps(box.offsets[dim], box.sizes[dim]):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = first, count
        yield Box(tuple(offsets), tuple(sizes)), view.narrow(dim, at - box.offsets[dim], count)


def overlap(one: Box, other: Box) -> Box | None:
    """Returns the intersection of two boxes of one tensor; None if it is empty."""
    offsets = tuple(max(a, b) for a, b in zip(one.offsets, other.offsets, strict=True))
    ends = tuple(
        min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


#: Most bytes that saving and loading hold beside the tensors themselves.
BUCKET_BYTES = 64 * 2**20


def full_box(shape: tuple[int, ...]) -> Box:
    """Returns the box that covers a full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def is_tiling(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Returns whether the boxes cover each element of a tensor of ``shape`` exactly once.

    A box's indicator function is determined by the signs at its ``2 ** ndim`` corners (its mixed difference), and so is
    a sum of them. The boxes tile the tensor exactly if their signed corners add up to those of the full tensor: gaps
    and overlaps of equal size, which a sum of volumes would miss, do not cancel.

    Boxes that are sharded along one dim only, as most are, need no corners: they are contiguous along it.
    """
    boxes = [box for box in boxes if box.numel > 0]
    along = _cut_along(shape, boxes)
    if along is not None:
        at = 0
        for offset, size in sorted((box.offsets[along], box.sizes[along]) for box in boxes):
            if offset != at:
                return False
            at += size
        return at == shape[along]
    corners: Counter[tuple[int, ...]] = Counter()
    for box, factor in itertools.chain(((box, 1) for box in boxes), [(full_box(shape), -1)]):
        edges = [(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
        for ends in itertools.product((0, 1), repeat=len(edges)):
            sign = -1 if sum(ends) % 2 else 1
            corners[tuple(edge[end] for edge, end in zip(edges, ends, strict=True))] += factor * sign
    return not any(corners.values())


def _cut_along(shape: tuple[int, ...], boxes: list[Box]) -> int | None:
    """Returns the only dim along which the boxes differ from the full tensor; None if there are several, or none."""
    along: set[int] = set()
    for box in boxes:
        if box.sizes != shape:
            along.update(dim for dim, size in enumerate(shape) if box.sizes[dim] != size or box.offsets[dim])
            if len(along) > 1:
                return None
        elif any(box.offsets):
            return None
    return along.pop() if len(along) == 1 and math.prod(shape) > 0 else None


def split_box(box: Box, element_bytes: int, most_bytes: int = BUCKET_BYTES) -> Iterator[Box]:
    """Yields slices of a box in row-major order, each of at most ``most_bytes`` (but at least one element).

    Each slice is a run of consecutive elements of the box, so that the slices, concatenated, are the box.
    """
    if box.numel == 0:
        return
    if box.numel * element_bytes <= most_bytes or not box.sizes:
        yield box
        return
    row_bytes = math.prod(box.sizes[1:]) * element_bytes
    if row_bytes > most_bytes:
        for row in range(box.sizes[0]):
            for part in split_box(Box(box.offsets[1:], box.sizes[1:]), element_bytes, most_bytes):
                yield Box((box.offsets[0] + row, *part.offsets), (1, *part.sizes))
        return
    rows = max(1, most_bytes // row_bytes)
    for start in range(0, box.sizes[0], rows):
        count = min(rows, box.sizes[0] - start)
        yield Box((box.offsets[0] + start, *box.offsets[1:]), (count, *box.sizes[1:]))


def slice_view(tensor: Tensor, box: Box, part: Box) -> Tensor:
    """Returns a view of the elements of ``part`` in ``tensor``, which holds the elements of ``box``."""
    view = tensor
    for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        view = view.narrow(dim, offset - box.offsets[dim], size)
    return view


def byte_range(box: Box, part: Box, element_bytes: int) -> tuple[int, int]:
    """Returns the byte range that the elements of ``part`` span in a row-major ``box``, gaps included."""
    strides = [math.prod(box.sizes[dim + 1 :]) for dim in range(len(box.sizes))]
    starts = [offset - at for offset, at in zip(part.offsets, box.offsets, strict=True)]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True))
    return first * element_bytes, (last + 1) * element_bytes


@dataclass(frozen=True)
class TensorSlice:
    """Slice of a tensor along one dim.

    Attributes:
        dim: Dimension that is sliced.
        size: Size of the full tensor along the dim.
        runs: Ranges of indices along the dim, as `(first, count)`, in the slice's order.
        inner: Slice of this slice along another dim, which then is the rank's; None for this slice itself.
    """

    dim: int
    size: int
    runs: tuple[tuple[int, int], ...]
    inner: TensorSlice | None = None

    @property
    def length(self) -> int:
        """The slice's size along the dim."""
        return sum(count for _, count in self.runs)

    def slice_tensor(self, whole: Tensor) -> Tensor:
        """Returns the slice of a full tensor, copied."""
        assert whole.shape[self.dim] == self.size
        sliced = torch.cat([whole.narrow(self.dim, first, count) for first, count in self.runs], dim=self.dim)
        return sliced if self.inner is None else self.inner.slice_tensor(sliced)

    def write_slice(self, whole: Tensor, part: Tensor) -> None:
        """Writes the slice into a full tensor."""
        at = 0
        for first, count in self.runs:
            target, piece = whole.narrow(self.dim, first, count), part.narrow(self.dim, at, count)
            if self.inner is None:
                target.copy_(piece)
            else:
                self.inner.write_slice(target, piece)
            at += count

    def slice_shape(self, whole: torch.Size) -> torch.Size:
        """Returns the slice's shape."""
        assert whole[self.dim] == self.size
        shape = torch.Size([self.length if dim == self.dim else size for dim, size in enumerate(whole)])
        return shape if self.inner is None else self.inner.slice_shape(shape)

    def full_shape(self, part: torch.Size) -> torch.Size:
        """Returns the full tensor's shape."""
        part = part if self.inner is None else self.inner.full_shape(part)
        assert part[self.dim] == self.length
        return torch.Size([self.size if dim == self.dim else size for dim, size in enumerate(part)])

    def overlaps(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yields the full tensor's ranges for indices of the slice: `(index in slice, index in tensor, count)`.

        Args:
            first: First index in the slice.
            count: Number of indices.
        """
        at = 0
        for start, length in self.runs:
            low, high = max(first, at), min(first + count, at + length)
            if low < high:
                yield low, start + low - at, high - low
            at += length


def make_equal_slice(dim: int, size: int, ranks: int, rank: int, pieces: int = 1) -> TensorSlice:
    """Returns a rank's slice of a dim of equal pieces, of each of which it holds an equal part.

    Args:
        dim: Dimension to slice.
        size: Size of the dim.
        ranks: Number of ranks that share it.
        rank: Rank whose slice is returned.
        pieces: Number of pieces that are concatenated along the dim: 3 for queries, keys and values.

    Raises:
        DloError: if the ranks do not divide the size.
    """
    if size % (pieces * ranks):
        raise DloError(f"size must be divisible by {pieces * ranks} ({ranks} ranks), got {size}; use fewer ranks")
    piece = size // pieces
    share = piece // ranks
    return TensorSlice(dim, size, tuple((number * piece + rank * share, share) for number in range(pieces)))


@dataclass
class Layout:
    """Result of tensor and pipeline parallelism on a model. Names are relative to the model.

    Attributes:
        slices: Slices of the parameters and buffers that the ranks of the tp axis share, and of those in `experts`.
            Where `tp` and `ep` both slice a parameter, the slice of `ep` is in that of `tp`.
        partial: Parameters that each rank holds in full and whose gradients must be summed over the tp axis.
        other_stages: Parameters and buffers of other pipeline stages; here they are on the meta device, so that
            optimizer groups and checkpoints know all names.
        tied_copies: Parameters of which an earlier pipeline stage holds a copy: an embedding that the head is tied to.
            The gradients of the copies must be summed.
        experts: Parameters that are sliced over `ep`, between full experts. The ranks of dp_shard x cp with the same
            slice shard it, and average its gradients.
        expert_modules: Modules that hold these parameters, each called by the router's module.
    """

    slices: dict[str, TensorSlice] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    other_stages: set[str] = field(default_factory=set)
    tied_copies: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)
    expert_modules: list[str] = field(default_factory=list)

    def with_prefix(self, prefix: str) -> Layout:
        """Returns the layout with the names of a module that holds the model under a name."""
        return Layout(
            {f"{prefix}.{name}": cut for name, cut in self.slices.items()},
            {f"{prefix}.{name}" for name in self.partial},
            {f"{prefix}.{name}" for name in self.other_stages},
            {f"{prefix}.{name}" for name in self.tied_copies},
            {f"{prefix}.{name}" for name in self.experts},
            [f"{prefix}.{name}" for name in self.expert_modules],
        )


#: Attribute of a split model that holds its layout.
_LAYOUT = "_dlo_layout"


def get_layout(module: nn.Module) -> Layout:
    """Returns a model's layout, to be read and extended; an empty one if the model has not been split."""
    layout: Layout = module.__dict__.setdefault(_LAYOUT, Layout())
    return layout
