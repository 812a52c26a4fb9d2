"""Who writes what: each rank says which boxes it holds, and all of them come to the same division of the work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from dlo_framework.checkpoint.boxes import tiles, whole
from dlo_framework.checkpoint.dtypes import dtype_name, dtype_of
from dlo_framework.checkpoint.nest import Place
from dlo_framework.checkpoint.shards import Box, Shard, held_boxes
from dlo_framework.checkpoint.tensor_file import layout

#: A box up to this size that several ranks hold is the first one's to write: buffers that differ over the ranks
#: (statistics of a batch norm that is not synchronised) then come from one rank, as under plain data parallelism.
SMALL_BYTES = 128 * 1024

Key = tuple[str, str]
Spans = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Holding(NamedTuple):
    """What one rank holds of one tensor; plain data, to be sent to the others.

    Attributes:
        path: where the tensor stands in the checkpoint.
        key: the group and the name that it is stored under.
        dtype: torch's name of its type.
        shape: the whole tensor's.
        spans: the boxes that the rank holds.
    """

    path: tuple[str | int, ...]
    key: Key
    dtype: str
    shape: tuple[int, ...]
    spans: Spans


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and where its bytes lie: ``[begin, end)`` of ``file``."""

    box: Box
    file: str
    begin: int
    end: int


@dataclass
class SavedTensor:
    """A tensor in a checkpoint: its type, its shape, and the chunks that together are it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)


@dataclass(frozen=True)
class FilePlan:
    """A rank's file: its first bytes, then these boxes in this order."""

    name: str
    head: bytes
    boxes: list[tuple[Key, Box]]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """The division of a save: a file a rank (None for a rank that writes nothing), and the tensors' places in them."""

    files: list[FilePlan | None]
    tensors: dict[Key, SavedTensor]
    paths: dict[Key, tuple[str | int, ...]]

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.bytes for file in self.files if file is not None)


def hold(found: Iterable[tuple[Place, Shard]]) -> tuple[list[Holding], dict[tuple[Key, Box], Tensor]]:
    """Returns what this rank holds: to be told to the others, and the elements of each box."""
    holdings: list[Holding] = []
    elements: dict[tuple[Key, Box], Tensor] = {}
    seen: set[Key] = set()
    for place, shard in found:
        key = (place.group, place.name)
        assert key not in seen, f"two tensors of a checkpoint are called {key}"
        seen.add(key)
        held = [(box, tensor) for box, tensor in held_boxes(shard.detach()) if box.numel > 0]
        for box, tensor in held:
            elements[key, box] = tensor
        spans = tuple((box.offsets, box.sizes) for box, _ in held)
        assert isinstance(shard, Shard)
        holdings.append(Holding(place.path, key, dtype_name(shard.dtype), tuple(shard.shape), spans))
    return holdings, elements


def divide(holdings: Sequence[Sequence[Holding]]) -> Plan:
    """Divides the boxes among the ranks that hold them: each is written once, by the rank with the least to write.

    The answer depends on the holdings alone, so that all ranks come to the same without a word more. It takes tens
    of microseconds a box, so the last one is kept: a run's saves are mostly alike.

    Args:
        holdings: each rank's.
    """
    return _divide(tuple(map(tuple, holdings)))


@lru_cache(maxsize=1)
def _divide(holdings: tuple[tuple[Holding, ...], ...]) -> Plan:
    tensors: dict[Key, SavedTensor] = {}
    paths: dict[Key, tuple[str | int, ...]] = {}
    holders: dict[tuple[Key, Box], list[int]] = {}
    for rank, of_rank in enumerate(holdings):
        for item in of_rank:
            known = tensors.setdefault(item.key, SavedTensor(item.dtype, item.shape))
            assert (known.dtype, known.shape) == (item.dtype, item.shape), (
                f"ranks hold {item.key} as {known.dtype}{known.shape} and as {item.dtype}{item.shape}"
            )
            paths.setdefault(item.key, item.path)
            for offsets, sizes in item.spans:
                holders.setdefault((item.key, Box(tuple(offsets), tuple(sizes))), []).append(rank)
    boxes_of: dict[Key, list[Box]] = {key: [] for key in tensors}
    for key, box in holders:
        boxes_of[key].append(box)
    for key, boxes in boxes_of.items():
        shape = tensors[key].shape
        assert tiles(shape, boxes), f"the boxes that ranks hold of {key}, shape {shape}, do not tile it: {boxes[:8]}"
    writers = _writers(holders, {key: dtype_of(tensor.dtype).itemsize for key, tensor in tensors.items()})
    files = [_file(rank, boxes, tensors) for rank, boxes in enumerate(_by_rank(writers, len(holdings)))]
    return Plan(files, tensors, paths)


def _writers(holders: dict[tuple[Key, Box], list[int]], element: dict[Key, int]) -> dict[tuple[Key, Box], int]:
    ranks = 1 + max((max(who) for who in holders.values()), default=0)
    load = [0] * ranks
    writers: dict[tuple[Key, Box], int] = {}
    shared: list[tuple[int, int, tuple[Key, Box]]] = []
    for order, (item, who) in enumerate(holders.items()):
        size = item[1].numel * element[item[0]]
        if len(who) == 1 or size <= SMALL_BYTES:
            writers[item] = min(who)
            load[min(who)] += size
        else:
            shared.append((-size, order, item))
    # The largest first: the small ones then even out what is left.
    for negative, _, item in sorted(shared, key=lambda entry: entry[:2]):
        writer = min(holders[item], key=lambda rank: (load[rank], rank))
        writers[item] = writer
        load[writer] -= negative
    return writers


def _by_rank(writers: dict[tuple[Key, Box], int], ranks: int) -> list[list[tuple[Key, Box]]]:
    """Returns each rank's boxes, tensor by tensor, in the order of their elements."""
    order = {key: number for number, key in enumerate(dict.fromkeys(key for key, _ in writers))}
    split: list[list[tuple[Key, Box]]] = [[] for _ in range(ranks)]
    for (key, box), rank in sorted(writers.items(), key=lambda entry: (order[entry[0][0]], entry[0][1])):
        split[rank].append((key, box))
    return split


def _file(rank: int, boxes: list[tuple[Key, Box]], tensors: dict[Key, SavedTensor]) -> FilePlan | None:
    """Plans a rank's file and adds its chunks to the tensors."""
    if not boxes:
        return None
    name = f"shard-{rank:05d}.safetensors"
    # Larger elements first, so that each tensor is aligned; the sort keeps the order within a size.
    boxes = sorted(boxes, key=lambda item: -dtype_of(tensors[item[0]].dtype).itemsize)
    entries = [(entry_name(key, box, tensors[key].shape), tensors[key].dtype, box.sizes) for key, box in boxes]
    head, stored = layout(entries, {"format": "pt", "written_by": "dlo", "rank": str(rank)})
    for (key, box), (entry, _, _) in zip(boxes, entries, strict=True):
        tensors[key].chunks.append(Chunk(box, name, stored[entry].begin, stored[entry].end))
    return FilePlan(name, head, boxes, max(place.end for place in stored.values()))


def entry_name(key: Key, box: Box, shape: tuple[int, ...]) -> str:
    """Returns a chunk's name in its file: ``model/head.weight``, ``model/head.weight[0:512,0:384]`` for a part."""
    name = "/".join(key)
    if box == whole(shape):
        return name
    spans = (f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True))
    return f"{name}[{','.join(spans)}]"
