"""Global plan of a save: each rank lists its boxes of the tensors, and rank 0 decides which rank writes each box.

The number of boxes is that of the tensors times the ranks that shard them, millions in a large run. So they are columns
of numbers here, one row for each box, and not objects.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlo_framework.checkpoint.manifest import Key, Run, dtype_name, dtype_of, next_box, shard_name
from dlo_framework.checkpoint.state_tree import TensorLocation
from dlo_framework.errors import DloError
from dlo_framework.shards import Box, Shard, full_box, held_boxes, is_tiling


class InventoryEntry(NamedTuple):
    """One rank's shard of one tensor, as plain data.

    Attributes:
        path: Keys that lead to the tensor from the top of the checkpoint.
        key: Group and name that the tensor is stored under.
        dtype: Torch's name of the element type.
        shape: Shape of the full tensor.
        boxes: Boxes that the rank holds.
    """

    path: tuple[str | int, ...]
    key: Key
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class PackedInventory(NamedTuple):
    """One rank's inventory, packed into about a hundredth of the tuples' memory.

    Attributes:
        tensors: Path, key, dtype and shape of each tensor; the same on all ranks if each holds a shard of every tensor.
        boxes: Distinct lists of boxes that the rank holds of any tensor, and for each tensor its list's number.
    """

    tensors: bytes
    boxes: bytes


def local_inventory(
    tensors: Iterable[tuple[TensorLocation, Shard]],
) -> tuple[list[InventoryEntry], dict[tuple[Key, Box], Tensor]]:
    """Returns this rank's inventory and the elements of each box."""
    holdings: list[InventoryEntry] = []
    elements: dict[tuple[Key, Box], Tensor] = {}
    for place, shard in tensors:
        key = (place.group, place.name)
        held = [(box, tensor) for box, tensor in held_boxes(shard.detach()) if box.numel > 0]
        elements |= {(key, box): tensor for box, tensor in held}
        boxes = tuple(box for box, _ in held)
        holdings.append(InventoryEntry(place.path, key, dtype_name(shard.dtype), tuple(shard.shape), boxes))
    keys = Counter(holding.key for holding in holdings)
    assert len(keys) == len(holdings), f"two tensors of a checkpoint are called {keys.most_common(1)[0][0]}"
    return holdings, elements


def pack_inventory(holdings: Sequence[InventoryEntry]) -> PackedInventory:
    """Packs a rank's inventory."""
    lists: dict[tuple[Box, ...], int] = {}
    numbers = [lists.setdefault(holding.boxes, len(lists)) for holding in holdings]
    tensors = [tuple(holding[:4]) for holding in holdings]
    return PackedInventory(pack(tensors), pack((list(lists), numbers)))


def pack(value: Any) -> bytes:
    """Returns a value as compressed bytes."""
    return zlib.compress(pickle.dumps(value), level=1)


def unpack(packed: bytes) -> Any:
    """Returns a value that another rank has packed."""
    return pickle.loads(zlib.decompress(packed))


#: Largest box that the lowest of its ranks always writes: buffers that differ between ranks (statistics of a batch norm
#: that is not synchronised) then come from one rank, as under plain data parallelism.
SMALL_BYTES = 128 * 1024
#: Approximate size of a box's entry in the header of a file, without its name.
_ENTRY_BYTES = 128

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class FilePlan:
    """Plan of one rank's file.

    Attributes:
        name: Name of the file.
        boxes: Tensor and box of each entry, in the order of the file.
        entries: Name, dtype and shape of each entry, for the file's header.
        bytes: Size of all tensors in the file, in bytes.
    """

    name: str
    boxes: list[tuple[Key, Box]]
    entries: list[tuple[str, str, tuple[int, ...]]]
    bytes: int


@dataclass(frozen=True)
class PlannedTensor:
    """Tensor of a plan, and the locations of its boxes.

    Attributes:
        path: Keys that lead to the tensor from the top of the checkpoint.
        dtype: Torch's name of the element type.
        shape: Shape of the full tensor.
        runs: Runs whose boxes tile the tensor; the number of a run's shard is the rank that writes it.
    """

    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    runs: list[Run]


@dataclass(frozen=True)
class Plan:
    """Global plan of a save.

    Attributes:
        masks: Bit mask of each rank over the boxes it holds, in its own order: the boxes that it writes.
        sizes: Size of the tensors in each rank's file, in bytes.
        tensors: Tensors of the checkpoint, with their locations in the files.
        bytes: Approximate size of all files, in bytes; the headers are estimated.
    """

    masks: list[bytes]
    sizes: list[int]
    tensors: dict[Key, PlannedTensor]
    bytes: int


def make_global_plan(inventories: Sequence[PackedInventory]) -> Plan:
    """Assigns each box to one of the ranks that hold it, the one with the fewest bytes to write.

    Args:
        inventories: Packed inventory of each rank.

    Raises:
        DloError: if the ranks' boxes of a tensor do not cover each of its elements once.
    """
    registry = _Registry()
    held = [registry.take(one) for one in inventories]
    boxes = sorted(registry.boxes)
    # From here on a box's number is its rank in the order of offsets and sizes.
    place = np.empty(len(boxes), np.int64)
    place[[registry.boxes[box] for box in boxes]] = np.arange(len(boxes))
    rank = np.repeat(np.arange(len(held)), [len(tensors) for tensors, _ in held])
    tensor = np.concatenate([tensors for tensors, _ in held])
    box = place[np.concatenate([numbers for _, numbers in held])]
    element = np.array([dtype_of(dtype).itemsize for _, dtype, _ in registry.tensors.values()], np.int64)
    size = np.array([box.numel for box in boxes], np.int64)[box] * element[tensor]
    # A box that several ranks hold is several rows and one item; items are in the order of tensors and boxes.
    _, first, item, count = np.unique(
        tensor * len(boxes) + box, return_index=True, return_inverse=True, return_counts=True
    )
    _check_tiling(registry, boxes, tensor[first], box[first], len(held))
    writer = _writers(rank, item, first, count, size[first])
    writes = writer[item] == rank
    begin, sizes = _offsets(np.flatnonzero(writes), rank, item, element[tensor], size, len(held))
    bounds = np.searchsorted(rank, np.arange(len(held) + 1))
    masks = [np.packbits(writes[low:high]).tobytes() for low, high in pairwise(bounds)]
    runs = _runs(boxes, tensor[first], box[first], writer, begin, len(registry.tensors))
    names = np.array([len("/".join(key)) + _ENTRY_BYTES for key in registry.tensors], np.int64)
    return Plan(
        masks,
        sizes.tolist(),
        {
            key: PlannedTensor(*known, of_key)
            for (key, known), of_key in zip(registry.tensors.items(), runs, strict=True)
        },
        int(sizes.sum() + names[tensor[first]].sum()),
    )


def make_file_plan(rank: int, holdings: Sequence[InventoryEntry], mask: bytes, size: int) -> FilePlan | None:
    """Returns the plan of a rank's file; None if the rank writes nothing.

    Args:
        rank: Rank in the group.
        holdings: Inventory of the rank, as it was sent to rank 0.
        mask: Bit mask of the boxes that it writes; see :class:`Plan`.
        size: Size of these boxes, in bytes.
    """
    held = [(holding, box) for holding in holdings for box in holding.boxes]
    chosen = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(held))
    written = [held[number] for number in np.flatnonzero(chosen)]
    if not written:
        return None
    # Larger elements first, so that each tensor is aligned; the sort is stable.
    written.sort(key=lambda pair: -dtype_of(pair[0].dtype).itemsize)
    entries = [(_entry_name(of.key, box, of.shape), of.dtype, box.sizes) for of, box in written]
    return FilePlan(shard_name(rank), [(of.key, box) for of, box in written], entries, size)


def _entry_name(key: Key, box: Box, shape: tuple[int, ...]) -> str:
    """Returns a chunk's name in its file: ``model/head.weight``, or ``model/head.weight[0:512,0:384]`` for a slice."""
    name = "/".join(key)
    if box == full_box(shape):
        return name
    spans = (f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"{name}[{','.join(spans)}]"


class _Registry:
    """Tensors and boxes of all ranks, numbered in order of appearance."""

    def __init__(self) -> None:
        self.tensors: dict[Key, tuple[tuple[str | int, ...], str, tuple[int, ...]]] = {}
        self.boxes: dict[Box, int] = {}
        self._numbers: dict[Key, int] = {}
        self._lists: dict[bytes, Numbers] = {}

    def take(self, inventory: PackedInventory) -> tuple[Numbers, Numbers]:
        """Returns a rank's boxes in its order: the numbers of their tensors, and their own numbers."""
        if inventory.tensors not in self._lists:
            self._lists[inventory.tensors] = np.array(
                [self._number(*one) for one in unpack(inventory.tensors)], np.int64
            )
        lists, which = unpack(inventory.boxes)
        numbered = [[self.boxes.setdefault(box, len(self.boxes)) for box in boxes] for boxes in lists]
        counts = np.array([len(numbers) for numbers in numbered], np.int64)[np.array(which, np.int64)]
        held = np.fromiter(chain.from_iterable(numbered[number] for number in which), np.int64)
        return np.repeat(self._lists[inventory.tensors], counts), held

    def _number(self, path: tuple[str | int, ...], key: Key, dtype: str, shape: tuple[int, ...]) -> int:
        known = self.tensors.setdefault(key, (path, dtype, shape))
        assert known[1:] == (dtype, shape), f"ranks hold {key} as {known[1]}{known[2]} and as {dtype}{shape}"
        return self._numbers.setdefault(key, len(self._numbers))


def _check_tiling(registry: _Registry, boxes: list[Box], tensor: Numbers, box: Numbers, ranks: int) -> None:
    """Checks that the items of each tensor tile it. Tensors that are sharded in the same way are checked once."""
    bounds = np.searchsorted(tensor, np.arange(len(registry.tensors) + 1)).tolist()
    seen = set()
    for (key, (_, _, shape)), (low, high) in zip(registry.tensors.items(), pairwise(bounds), strict=True):
        cut = (shape, box[low:high].tobytes())
        if cut not in seen:
            own = [boxes[number] for number in box[low:high]]
            if not is_tiling(shape, own):
                raise DloError(_tiling_message(key, shape, own, ranks))
            seen.add(cut)


def _tiling_message(key: Key, shape: tuple[int, ...], own: list[Box], ranks: int) -> str:
    shards = ", ".join(f"offsets {box.offsets} sizes {box.sizes}" for box in own[:8]) or "none"
    if ranks == 1:
        fix = "save() on every rank with group=, the process group of all ranks that hold shards"
    else:
        fix = "give each element to one rank, or the same shard to several"
    return (
        f"the shards of {'/'.join(key)} on {ranks} rank{'s' * (ranks > 1)} must cover its shape {shape} once, got"
        f" {shards}; {fix}"
    )


def _writers(rank: Numbers, item: Numbers, first: Numbers, count: Numbers, size: Numbers) -> Numbers:
    """Returns the rank that writes each item.

    Args:
        rank: Rank of each row.
        item: Item of each row.
        first: First row of each item, which is its lowest rank's.
        count: Number of rows of each item.
        size: Size of each item, in bytes.
    """
    writer = rank[first]
    shared = np.flatnonzero((count > 1) & (size > SMALL_BYTES))
    if not len(shared):
        return writer
    load = np.zeros(int(rank.max()) + 1, np.int64)
    alone = np.ones(len(first), bool)
    alone[shared] = False
    np.add.at(load, writer[alone], size[alone])
    rows, ends = np.argsort(item, kind="stable"), np.cumsum(count)
    # The largest first: the small ones then balance the load.
    for number in shared[np.argsort(-size[shared], kind="stable")]:
        holders = rank[rows[ends[number] - count[number] : ends[number]]]
        writer[number] = holders[load[holders].argmin()]
        load[writer[number]] += size[number]
    return writer


def _offsets(
    written: Numbers, rank: Numbers, item: Numbers, element: Numbers, size: Numbers, ranks: int
) -> tuple[Numbers, Numbers]:
    """Returns each item's offset in its writer's file, and the bytes in each file; see :func:`make_file_plan`."""
    order = written[np.lexsort((written, -element[written], rank[written]))]
    sizes = np.zeros(ranks, np.int64)
    np.add.at(sizes, rank[order], size[order])
    before = np.cumsum(sizes) - sizes
    begin = np.empty(len(written), np.int64)
    begin[item[order]] = np.cumsum(size[order]) - size[order] - before[rank[order]]
    return begin, sizes


def _runs(
    boxes: list[Box], tensor: Numbers, box: Numbers, writer: Numbers, begin: Numbers, tensors: int
) -> list[list[Run]]:
    """Joins each tensor's items to runs, along the dim where most of them are contiguous."""
    dims = max((len(one.sizes) for one in boxes), default=0) or 1
    numbers = {one: number for number, one in enumerate(boxes)}
    joined = np.zeros((dims, tensors), np.int64)
    orders = np.empty((dims, len(boxes)), np.int64)  # positions of the boxes, contiguous ones side by side
    after = np.full((dims, len(boxes)), -1)
    for dim in range(dims):
        along = sorted((_sort_key(one, dim), number) for number, one in enumerate(boxes))
        orders[dim, [number for _, number in along]] = np.arange(len(boxes))
        after[dim] = [numbers.get(next_box(one, dim), -1) if dim < len(one.sizes) else -1 for one in boxes]
        order = np.lexsort((orders[dim][box], tensor))
        links = _links(after[dim][box[order]], tensor[order], box[order], writer[order], begin[order])
        joined[dim] = np.bincount(tensor[order][:-1][links], minlength=tensors)
    dim_of = joined.argmax(axis=0)[tensor]
    order = np.lexsort((orders[dim_of, box], tensor))
    tensor, box, writer, begin, dim_of = (column[order] for column in (tensor, box, writer, begin, dim_of))
    links = _links(after[dim_of, box], tensor, box, writer, begin)
    strides = np.diff(writer)
    links[1:] &= ~links[:-1] | (strides[1:] == strides[:-1])
    starts = np.concatenate([np.zeros(min(1, len(tensor)), np.int64), np.flatnonzero(~links) + 1])
    lengths = np.diff(np.append(starts, len(tensor)))
    strides = np.append(strides, 1)[starts]
    runs: list[list[Run]] = [[] for _ in range(tensors)]
    columns = (tensor[starts], box[starts], writer[starts], begin[starts], lengths, dim_of[starts], strides)
    for of, number, shard, at, length, *rest in zip(*(column.tolist() for column in columns), strict=True):
        runs[of].append(Run(boxes[number], shard, at, length, *(rest if length > 1 else ())))
    return runs


def _links(after: Numbers, tensor: Numbers, box: Numbers, writer: Numbers, begin: Numbers) -> NDArray[np.bool_]:
    """Returns, for each item but the last, whether the next one continues its run; ``after`` is the box that would."""
    same = (np.diff(tensor) == 0) & (np.diff(begin) == 0) & (np.diff(writer) > 0)
    return same & (after[:-1] == box[1:])


def _sort_key(box: Box, dim: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns a sort key that makes boxes neighbours if they are contiguous along a dim."""
    offsets = box.offsets
    return (*offsets[:dim], *offsets[dim + 1 :]), box.sizes, offsets[dim : dim + 1]
