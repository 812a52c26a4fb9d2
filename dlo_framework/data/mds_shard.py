"""Reads shards of MosaicML's MDS format, version 2.

A dataset is a folder with ``index.json``, which lists the shards and their columns, and the shards themselves:

```
0      samples     uint32          number of samples n
4      offsets     uint32 [n + 1]  offset of each sample in the file, and the end of the last
..     columns     JSON            the columns again
..     samples                     for each: uint32 sizes of its variable columns, then all columns' bytes
```

All numbers are little-endian. Columns with the encoding ``pkl`` are never read: a pickle can run any code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from dlo_framework.data.remote import ByteFile
from dlo_framework.errors import DloError, did_you_mean

#: Sizes of values of fixed size, in bytes, by encoding.
_FIXED = {
    **{f"{kind}{bits}": bits // 8 for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": bits // 8 for bits in (16, 32, 64)},
    "int": 8,
}
#: Types of arrays, by their code in a sample.
_VALUE_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}


class MdsShard:
    """One shard, with random access to its samples.

    Args:
        file: File of the shard.
        entry: Entry of the shard in ``index.json``.

    Raises:
        DloError: If the shard is compressed, or of another version.
    """

    def __init__(self, file: ByteFile, entry: dict[str, Any]) -> None:
        if entry.get("format") != "mds" or entry.get("version") != 2:
            raise DloError(
                f"{file.name} must be an MDS shard of version 2, got {entry.get('format')} {entry.get('version')}"
            )
        self.file, self.name = file, file.name
        self.samples: int = entry["samples"]
        self.columns: list[str] = entry["column_names"]
        self.encodings: dict[str, str] = dict(zip(self.columns, entry["column_encodings"], strict=True))
        self.sizes: dict[str, int | None] = dict(zip(self.columns, entry["column_sizes"], strict=True))
        self._offsets: np.ndarray | None = None

    def __len__(self) -> int:
        return self.samples

    def check_column(self, column: str) -> None:
        """Checks that a column can be read.

        Raises:
            DloError: If there is none of this name, or it is a pickle.
        """
        if column not in self.encodings:
            raise DloError(
                f"column must be one of {', '.join(self.columns)} for {self.name}, got {column!r}"
                f"{did_you_mean(column, self.columns)}"
            )
        if self.encodings[column] == "pkl":
            raise DloError(
                f"column {column!r} of {self.name} must not be a pickle, which can run any code; write it as ndarray"
            )

    def offsets(self) -> np.ndarray:
        """Returns the offset of each sample and the end of the last, int64 [samples + 1]."""
        if self._offsets is None:
            content = self.file.read(0, 4 * (self.samples + 2))
            numbers = np.frombuffer(content, "<u4")
            if len(numbers) != self.samples + 2 or numbers[0] != self.samples or numbers[-1] != self.file.size:
                raise DloError(f"{self.name} must have {self.samples} samples, as in index.json; copy it again")
            self._offsets = numbers[1:].astype(np.int64)
        return self._offsets

    def range(self, index: int) -> tuple[int, int]:
        """Returns the offset and the size of a sample in the file."""
        first, past = self.offsets()[index : index + 2].tolist()
        return first, past - first

    def read(self, index: int, *columns: str) -> tuple[bytes, ...]:
        """Returns the bytes of some columns of a sample."""
        content = self.file.read(*self.range(index))
        variable = [name for name in self.columns if not self.sizes[name]]
        sizes = np.frombuffer(content, "<u4", len(variable)).tolist()
        lengths = {**self.sizes, **dict(zip(variable, sizes, strict=True))}
        at, found = 4 * len(variable), {}
        for name in self.columns:
            length = lengths[name]
            assert length is not None
            found[name] = content[at : at + length]
            at += length
        return tuple(found[name] for name in columns)

    def variable_sizes(self, column: str) -> np.ndarray | None:
        """Returns the bytes of a column in each sample, from the offsets alone; None if that is impossible."""
        fixed = self.sizes[column]
        if fixed:
            return np.full(self.samples, fixed, np.int64)
        if any(not size for name, size in self.sizes.items() if name != column):
            return None
        others = sum(size or 0 for size in self.sizes.values())
        return np.diff(self.offsets()) - others - 4

    def stamp(self) -> str:
        """Returns a string that changes when the shard does."""
        return str(getattr(self.file, "stamp", lambda: self.name)())


def read_mds_index(content: bytes, name: str) -> list[dict[str, Any]]:
    """Returns the entries of the shards in an ``index.json``.

    Raises:
        DloError: If it is not such an index, or shards are compressed.
    """
    try:
        entries: list[dict[str, Any]] = json.loads(content)["shards"]
        compressed = next((entry for entry in entries if entry["zip_data"]), None)
    except (ValueError, KeyError, TypeError) as error:
        raise DloError(f"{name} must be the index of an MDS dataset, got invalid content ({error!r})") from error
    if compressed is not None:
        raise DloError(
            f"{name}: shards must not be compressed, got {compressed['zip_data']['basename']}, because a sample could"
            " not be read by itself; write them again with compression=None"
        )
    return entries


def decode_mds_array(content: bytes, encoding: str) -> np.ndarray:
    """Returns the array in a column with the encoding ``ndarray``, ``ndarray:TYPE`` or ``ndarray:TYPE:SHAPE``, flat."""
    kind, shaped = _array_type(encoding)
    at = 0
    if kind is None:
        kind, at = np.dtype(_VALUE_TYPES[content[0]]), 1
    if not shaped:
        dims, width = content[at] >> 2, 1 << (content[at] & 3)
        at += 1 + dims * width
    return np.frombuffer(content, kind.newbyteorder("<"), offset=at)


def decode_mds_scalar(content: bytes, encoding: str) -> Any:
    """Returns a number, a string or a JSON value."""
    if encoding in _FIXED:
        kind = "int64" if encoding == "int" else encoding
        return np.frombuffer(content, np.dtype(kind).newbyteorder("<"))[0].item()
    if encoding in ("str", "str_int"):
        text = content.decode()
        return int(text) if encoding == "str_int" else text
    if encoding == "json":
        return json.loads(content)
    raise DloError(f"encoding must be a number, str or json, got {encoding}")


def array_lengths(shard: MdsShard, column: str, on_sample: Callable[[int], object] | None = None) -> np.ndarray:
    """Returns the number of elements of an array column in each sample, int64 [samples].

    Sizes alone determine it where the type of the elements is fixed and no other column is variable; otherwise each
    sample is read.

    Args:
        shard: Shard to read.
        column: Name of the column.
        on_sample: Callback for progress, called with the number of samples since its last call.
    """
    encoding = shard.encodings[column]
    kind, shaped = _array_type(encoding)
    sizes = shard.variable_sizes(column)
    if sizes is not None and kind is not None:
        if shaped:
            return sizes // kind.itemsize
        found = np.full(len(sizes), -1, np.int64)
        for width, least in ((1, 1), (2, 1 << 8), (4, 1 << 16), (8, 1 << 32)):  # of the number of the only dim's size
            count, rest = np.divmod(sizes - 1 - width, kind.itemsize)
            fits = (found < 0) & (rest == 0) & (count >= least) & ((count < 256**width) | (width == 8))
            found[fits] = count[fits]
        if (found < 0).any():
            raise DloError(f"column {column!r} of {shard.name} must have arrays with one dim, got others")
        return found
    lengths = np.empty(len(shard), np.int64)
    for index in range(len(shard)):
        lengths[index] = decode_mds_array(shard.read(index, column)[0], encoding).size
        if on_sample is not None:
            on_sample(1)
    return lengths


def _array_type(encoding: str) -> tuple[np.dtype | None, bool]:
    """Returns the type of the elements, or None, and whether the shape is fixed."""
    parts = encoding.split(":")
    return (np.dtype(parts[1]) if len(parts) > 1 else None), len(parts) > 2
