"""Reads Megatron-LM's indexed datasets: ``PREFIX.bin`` with the tokens, ``PREFIX.idx`` with the sequences.

The index, little-endian, version 1 of Megatron-LM's ``indexed_dataset.py``:

```
0    magic     b"MMIDIDX\\0\\0"
9    version   uint64            1
17   type      uint8             of the tokens
18   sequences uint64            n
26   documents uint64            d, with the end: number of documents plus one
34   lengths   int32 [n]         tokens of each sequence
     pointers  int64 [n]         offset of each sequence in the .bin, in bytes
     bounds    int64 [d]         first sequence of each document, and n
```

Both files are mapped, so that a corpus of any size opens at once. A remote index is fetched in full; remote tokens are
fetched in blocks.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from dlo_framework.data.remote import LocalFile, RemoteFile
from dlo_framework.errors import DloError
from dlo_tasks.llm.streams.token_shards import gather_windows, map_bytes

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = 34
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}


class MegatronShard:
    """One pair of ``.bin`` and ``.idx``; a :class:`dlo_tasks.llm.streams.token_shards.TokenShard`.

    Args:
        tokens: File of the tokens.
        index: File of the index.

    Raises:
        DloError: If the index is damaged, has another version, or does not belong to the tokens.
    """

    def __init__(self, tokens: LocalFile | RemoteFile, index: LocalFile | RemoteFile) -> None:
        self.name, self.file, self._index = tokens.name, tokens, index.local_path()
        with open(self._index, "rb") as file:
            head = file.read(_HEADER)
        if len(head) < _HEADER or not head.startswith(_MAGIC):
            raise DloError(f"{index.name} must be an index of Megatron-LM, got another file; correct the path")
        version, code, sequences, bounds = struct.unpack("<QBQQ", head[len(_MAGIC) :])
        if version != 1 or code not in _TYPES:
            got = _FLOATS.get(code, f"type {code}")
            raise DloError(f"{index.name} must have version 1 and integer tokens, got version {version} and {got}")
        expected = _HEADER + sequences * 12 + bounds * 8
        size = self._index.stat().st_size
        if size != expected or bounds < 2:
            raise DloError(
                f"{index.name} must have {expected} bytes for {sequences} sequences and {bounds} bounds, got {size};"
                " copy it again"
            )
        self.kind = np.dtype(_TYPES[code])
        self._shape = int(sequences), int(bounds)
        self._map()
        self.documents = int(bounds) - 1
        self.tokens = tokens.size // self.kind.itemsize
        end = int(self._pointers[-1]) + int(self._lengths[-1]) * self.kind.itemsize if sequences else 0
        if end != tokens.size or (sequences and self._pointers[0] != 0) or self._bounds[-1] != sequences:
            raise DloError(
                f"{tokens.name} must have the {end} bytes that {index.name} describes, in the order of its sequences,"
                f" got {tokens.size}; copy both again"
            )

    def _map(self) -> None:
        sequences, bounds = self._shape
        # Searches read a few entries in random places.
        index = map_bytes(self._index, random=True)
        ends = np.cumsum([_HEADER, 4 * sequences, 8 * sequences, 8 * bounds]).tolist()
        self._lengths = index[ends[0] : ends[1]].view("<i4")
        self._pointers = index[ends[1] : ends[2]].view("<i8")
        self._bounds = index[ends[2] : ends[3]].view("<i8")
        self._ids: np.ndarray | None = None
        if isinstance(self.file, LocalFile) and self.file.size:
            self._ids = map_bytes(Path(self.file.path)).view(self.kind)

    def bounds(self, index: np.ndarray) -> np.ndarray:
        """Returns the first token of documents."""
        sequence = self._bounds[index]
        pointers = self._pointers[np.minimum(sequence, self._shape[0] - 1)]
        return np.where(sequence < self._shape[0], pointers // self.kind.itemsize, self.tokens)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns the ids of windows."""
        if self._ids is not None:
            return gather_windows(self._ids, starts, length)
        size = self.kind.itemsize
        rows = [self.file.read(start * size, length * size) for start in starts.tolist()]
        return np.frombuffer(b"".join(rows), self.kind).reshape(len(rows), length)

    def ranges(self, starts: np.ndarray, length: int) -> list[tuple[int, int]]:
        """Returns the ranges of windows."""
        size = self.kind.itemsize
        return [(start * size, length * size) for start in starts.tolist()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lengths": None, "_pointers": None, "_bounds": None, "_ids": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()
