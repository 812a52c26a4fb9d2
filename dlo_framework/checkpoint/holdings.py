"""What a rank holds of the tensors of a checkpoint, and how it is told to the rank that divides the work."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dlo_framework.checkpoint.chunks import Key
from dlo_framework.checkpoint.dtypes import dtype_name
from dlo_framework.checkpoint.nest import Place
from dlo_framework.checkpoint.shards import Box, Shard, held_boxes

Spans = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Holding(NamedTuple):
    """What one rank holds of one tensor; plain data.

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


class Told(NamedTuple):
    """What one rank holds, packed: a hundredth or so of the tuples' memory.

    Attributes:
        tensors: path, key, type and shape of each; where all ranks hold parts of all tensors, the same on all.
        boxes: the lists of boxes that the rank holds of any tensor, each once, and for each tensor the list's number.
    """

    tensors: bytes
    boxes: bytes


def hold(found: Iterable[tuple[Place, Shard]]) -> tuple[list[Holding], dict[tuple[Key, Box], Tensor]]:
    """Returns what this rank holds: to be told, and the elements of each box."""
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


def tell(holdings: Sequence[Holding]) -> Told:
    """Packs what a rank holds."""
    lists: dict[Spans, int] = {}
    numbers = [lists.setdefault(holding.spans, len(lists)) for holding in holdings]
    tensors = [tuple(holding[:4]) for holding in holdings]
    return Told(pack(tensors), pack((list(lists), numbers)))


def pack(value: Any) -> bytes:
    """Returns a value as few bytes."""
    return zlib.compress(pickle.dumps(value), level=1)


def unpack(packed: bytes) -> Any:
    """Returns what another rank has packed."""
    return pickle.loads(zlib.decompress(packed))
