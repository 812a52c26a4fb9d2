"""Tokens on disk: one file, memory-mapped, that all ranks and workers share.

The layout, little-endian:

```
0     magic, 8 bytes
8     SHA-256 of the header, 32 bytes
40    header: JSON, padded with spaces to 4,096 bytes
4096  tokens   uint16 or uint32 [T]   the highest bit is set where a token is learned
      bounds   int64 [N + 1]          document i is tokens bounds[i] to bounds[i + 1]
      hashes   uint64 [N]             of each document's content, for the split
      files    int64 [N]              which of the source files a document stands in
      rows     int64 [N]              and in which line
```

Each array begins at a multiple of 8. The header has the file's size and a checksum of all that follows it. A file is
written beside its place and renamed, so that a run that is stopped leaves none, and two runs at once are no trouble.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dlo_framework.errors import DloError
from dlo_tasks.llm.cache_folder import cached_file

#: Part of every cache's name: a new one makes caches anew.
FORMAT = 1
_MAGIC = b"DLOTOK\x01\n"
_HEADER = 4096
_CHUNK = 1 << 24  # bytes of the file that are checked at once


class Document(NamedTuple):
    """A tokenised document.

    Attributes:
        ids: of its tokens, integers [n].
        learned: bool [n]: whether a token is a target that the loss counts; the first one never is.
        digest: a hash of its content, below 2**64.
        file: which of the source files it stands in.
        row: and in which line or row, from 1; 0 where it is the whole file.
    """

    ids: np.ndarray
    learned: np.ndarray
    digest: int
    file: int
    row: int


class BadCache(DloError):
    """A token cache that is truncated, damaged, or of another format."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{path}: the token cache {what}; delete it, and it is made anew")


class TokenStore:
    """The documents of a cache file.

    Args:
        path: of the file.

    Raises:
        BadCache: if the file is not as long as its header says, or the header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        header = _read_header(self.path)
        count, documents = header["tokens"], header["documents"]
        kind = np.dtype(header["dtype"])
        self._flag = kind.type(1 << (8 * kind.itemsize - 1))
        self.all_learned: bool = header["all_learned"]
        start = _HEADER
        self._tokens = self._map(kind, start, count)
        start += _padded(count * kind.itemsize)
        self.bounds = self._map(np.dtype("<i8"), start, documents + 1)
        self.hashes = self._map(np.dtype("<u8"), start + 8 * (documents + 1), documents)
        self.files = self._map(np.dtype("<i8"), start + 8 * (2 * documents + 1), documents)
        self.rows = self._map(np.dtype("<i8"), start + 8 * (3 * documents + 1), documents)

    def _map(self, kind: np.dtype, offset: int, count: int) -> np.ndarray:
        if not count:  # which cannot be mapped
            return np.empty(0, kind)
        return np.memmap(self.path, kind, "r", offset, (count,))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.path,)  # A worker that is started maps the file for itself.

    def __len__(self) -> int:
        """Documents."""
        return len(self.bounds) - 1

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return len(self._tokens)

    def read(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens at these places, int64, and whether they are learned, bool; both of ``index``'s shape."""
        raw = self._tokens[index]
        return (raw & ~self._flag).astype(np.int64), (raw & self._flag) != 0

    def learned(self) -> np.ndarray:
        """Returns whether each token is learned, bool [T]."""
        return (self._tokens & self._flag) != 0


def write_store(path: Path, documents: Iterable[Document], vocab_size: int) -> None:
    """Writes documents to a cache file, one after the other, whole or not at all.

    Args:
        path: of the file; folders are made.
        documents: as they come; only a few numbers of each stay in memory.
        vocab_size: all ids are below it.

    Raises:
        DloError: if the folder cannot be written to, and for an id that is not below ``vocab_size``.
    """
    kind = np.dtype("<u2" if vocab_size <= 1 << 15 else "<u4")
    flag = kind.type(1 << (8 * kind.itemsize - 1))
    bounds, hashes, files, rows = array("q", [0]), array("Q"), array("q"), array("q")
    all_learned = True
    with cached_file(path, "the token cache") as partial, open(partial, "wb") as file:
        file.write(bytes(_HEADER))
        body = _Body(file)
        for document in documents:
            largest = int(document.ids.max(initial=0))
            if largest >= vocab_size:  # It could become another token.
                raise DloError(
                    f"a document has the token id {largest}, and the tokenizer's vocabulary has {vocab_size}; mend the"
                    " tokenizer, which writes ids that it has no token for"
                )
            ids = document.ids.astype(kind)
            ids[document.learned] |= flag
            all_learned = all_learned and bool(document.learned[1:].all())
            body.write(ids.tobytes())
            bounds.append(bounds[-1] + len(ids))
            hashes.append(document.digest)
            files.append(document.file)
            rows.append(document.row)
        body.write(bytes(-body.size % 8))
        for numbers in (bounds, hashes, files, rows):
            body.write(np.array(numbers).astype(np.dtype(numbers.typecode).newbyteorder("<")).tobytes())
        header = {
            "dtype": kind.str,
            "tokens": bounds[-1],
            "documents": len(hashes),
            "all_learned": all_learned,
            "size": _HEADER + body.size,
            "crc32": body.crc,
        }
        packed = json.dumps(header).encode().ljust(_HEADER - 40)
        file.seek(0)
        file.write(_MAGIC + hashlib.sha256(packed).digest() + packed)
        file.flush()
        os.fsync(file.fileno())


def verify(path: Path) -> None:
    """Reads a cache file through.

    Raises:
        BadCache: if any byte of it is not as it was written.
    """
    expected = _read_header(path)["crc32"]
    crc = 0
    with open(path, "rb") as file:
        file.seek(_HEADER)
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    if crc != expected:
        raise BadCache(path, "is damaged: its checksum is wrong")


class _Body:
    """What follows the header, with its size and checksum so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = self.crc = 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self.size += len(content)
        self.crc = zlib.crc32(content, self.crc)


def _read_header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        head = file.read(_HEADER)
    if not head.startswith(_MAGIC):
        raise BadCache(path, "is of another format, or none")
    if len(head) < _HEADER or hashlib.sha256(head[40:]).digest() != head[8:40]:
        raise BadCache(path, "has a damaged header")
    header: dict[str, Any] = json.loads(head[40:])
    size = path.stat().st_size
    if size != header["size"]:
        raise BadCache(path, f"is truncated: {size} of {header['size']} bytes")
    return header


def _padded(size: int) -> int:
    return size + -size % 8
