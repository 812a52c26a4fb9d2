"""Inventory of a rank's shards of a checkpoint, and its packed form, which the rank sends to rank 0."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dlo_framework.checkpoint.chunks import Key
from dlo_framework.checkpoint.dtypes import dtype_name
from dlo_framework.checkpoint.shards import Box, Shard, held_boxes
from dlo_framework.checkpoint.state_tree import TensorLocation

Spans = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class InventoryEntry(NamedTuple):
    """One rank's shard of one tensor, as plain data.

    Attributes:
        path: Keys that lead to the tensor from the top of the checkpoint.
        key: Group and name that the tensor is stored under.
        dtype: Torch's name of the element type.
        shape: Shape of the full tensor.
        spans: Boxes that the rank holds, each as offsets and sizes.
    """

    path: tuple[str | int, ...]
    key: Key
    dtype: str
    shape: tuple[int, ...]
    spans: Spans


class PackedInventory(NamedTuple):
    """One rank's inventory, packed into about a hundredth of the tuples' memory.

    Attributes:
        tensors: Path, key, dtype and shape of each tensor; the same on all ranks if each holds a shard of every tensor.
        boxes: Distinct lists of boxes that the rank holds of any tensor, and for each tensor its list's number.
    """

    tensors: bytes
    boxes: bytes


def local_inventory(
    found: Iterable[tuple[TensorLocation, Shard]],
) -> tuple[list[InventoryEntry], dict[tuple[Key, Box], Tensor]]:
    """Returns this rank's inventory and the elements of each box."""
    holdings: list[InventoryEntry] = []
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
        holdings.append(InventoryEntry(place.path, key, dtype_name(shard.dtype), tuple(shard.shape), spans))
    return holdings, elements


def pack_inventory(holdings: Sequence[InventoryEntry]) -> PackedInventory:
    """Packs a rank's inventory."""
    lists: dict[Spans, int] = {}
    numbers = [lists.setdefault(holding.spans, len(lists)) for holding in holdings]
    tensors = [tuple(holding[:4]) for holding in holdings]
    return PackedInventory(pack(tensors), pack((list(lists), numbers)))


def pack(value: Any) -> bytes:
    """Returns a value as compressed bytes."""
    return zlib.compress(pickle.dumps(value), level=1)


def unpack(packed: bytes) -> Any:
    """Returns a value that another rank has packed."""
    return pickle.loads(zlib.decompress(packed))
