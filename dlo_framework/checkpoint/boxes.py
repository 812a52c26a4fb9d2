"""Arithmetic on boxes: whether they tile a tensor, how to split a large one, and how to slice one out of another."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor

from dlo_framework.checkpoint.shards import Box

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
