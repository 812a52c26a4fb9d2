"""Cache of tokenised documents: its folder, and the file format, one memory-mapped file for all ranks and workers.

The layout, little-endian:

```
0     magic, 8 bytes
8     SHA-256 of the header, 32 bytes
40    header: JSON, padded with spaces to 4,096 bytes
4096  tokens   uint16 or uint32 [T]   highest bit: the token is a target
      bounds   int64 [N + 1]          document i is tokens bounds[i] to bounds[i + 1]
      hashes   uint64 [N]             hash of each document's content, for the split
      files    int64 [N]              index of each document's source file
      rows     int64 [N]              line of each document in that file
```

Each array begins at a multiple of 8. The header has the file's size and a checksum of the bytes after the header. A
file is written under a temporary name and renamed: an interrupted run leaves no partial file, concurrent runs do not
conflict.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dlo_framework.atomic_file import PARTIAL, open_atomic
from dlo_framework.errors import DloError

#: Age, in seconds, after which a temporary file is assumed to be abandoned.
_ABANDONED = 2 * 24 * 3600


@contextlib.contextmanager
def cached_file(path: Path, what: str) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to ``path`` on success; deletes it on failure.

    Args:
        path: Path of the file; its folder is created.
        what: Description of the file, for messages.

    Raises:
        DloError: If the folder cannot be written to.
    """
    try:
        with open_atomic(path, shared=True) as partial:
            for left in path.parent.glob(f"*{PARTIAL}"):  # of killed processes
                with contextlib.suppress(OSError):  # Another process may have removed it.
                    if time.time() - left.stat().st_mtime > _ABANDONED:
                        left.unlink()
            yield partial
    except OSError as error:
        raise DloError(
            f"{what} cannot be written to {path.parent}: {error}; set cache_dir to a writable folder with enough space"
        ) from error


#: Version of the format, part of every cache's name: a new version invalidates all caches.
FORMAT = 1
_MAGIC = b"DLOTOK\x01\n"
_HEADER = 4096
_CHUNK = 1 << 24  # bytes per read of the checksum


class Document(NamedTuple):
    """A tokenised document.

    Attributes:
        ids: Ids of its tokens, integers [n].
        learned: Whether each token is a target of the loss, bool [n]; the first token never is.
        digest: Hash of its content, below 2**64.
        file: Index of its source file.
        row: Line or row in the file, from 1; 0 where the document is the full file.
    """

    ids: np.ndarray
    learned: np.ndarray
    digest: int
    file: int
    row: int


class DamagedTokenCache(DloError):
    """Raised for a token cache that is truncated, damaged, or of another format."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{path}: the token cache {what}; delete it, and the next run writes it again")


class TokenStore:
    """Reads the documents of a cache file.

    Args:
        path: Path of the file.
        held_out: Fraction of each document's tokens, at its end, that is a document of its own: document `i` of the
            file becomes the documents `2i` and `2i + 1`. 0 leaves documents as they are.

    Raises:
        DamagedTokenCache: If the file's size differs from its header's, or the header is damaged.
    """

    def __init__(self, path: Path, held_out: float = 0.0) -> None:
        self.path, self.held_out = Path(path), held_out
        header = _read_header(self.path)
        count, documents = header["tokens"], header["documents"]
        kind = np.dtype(header["dtype"])
        self._flag = kind.type(1 << (8 * kind.itemsize - 1))
        self.all_learned: bool = header["all_learned"]
        #: Offset of the first token in the file, in bytes.
        self.offset = start = _HEADER
        #: Tokens as stored, with the flag of targets, uint16 or uint32 [T].
        self.raw = self._map(kind, start, count)
        start += count * kind.itemsize + -count * kind.itemsize % 8
        self.bounds = self._map(np.dtype("<i8"), start, documents + 1)
        self.hashes = self._map(np.dtype("<u8"), start + 8 * (documents + 1), documents)
        self.files = self._map(np.dtype("<i8"), start + 8 * (2 * documents + 1), documents)
        self.rows = self._map(np.dtype("<i8"), start + 8 * (3 * documents + 1), documents)
        if held_out:
            ends = self.bounds[1:] - np.ceil(np.diff(self.bounds) * held_out).astype(np.int64)
            self.bounds = np.append(np.stack([self.bounds[:-1], ends], 1), self.bounds[-1])
            self.hashes, self.files, self.rows = (np.repeat(x, 2) for x in (self.hashes, self.files, self.rows))

    def _map(self, kind: np.dtype, offset: int, count: int) -> np.ndarray:
        if not count:  # An empty file cannot be mapped.
            return np.empty(0, kind)
        return np.asarray(np.memmap(self.path, kind, "r", offset, (count,)))  # A memmap is slower to index.

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.path, self.held_out)  # A spawned worker maps the file itself.

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.bounds) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return len(self.raw)

    def read(self, index: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens at these indices, int64, and whether they are targets, bool; both of ``index``'s shape."""
        raw = self.raw[index]
        return self.without_flags(raw).astype(np.int64), (raw & self._flag) != 0

    def without_flags(self, raw: np.ndarray) -> np.ndarray:
        """Returns the ids of stored tokens, in the type of ``raw``."""
        return np.asarray(raw & ~self._flag)

    def learned(self) -> np.ndarray:
        """Returns whether each token is a target, bool [T]."""
        return (self.raw & self._flag) != 0


def write_store(path: Path, documents: Iterable[Document], vocab_size: int) -> None:
    """Writes documents to a cache file, one after the other, atomically.

    Args:
        path: Path of the file; folders are created.
        documents: Documents to write; only a few numbers of each stay in memory.
        vocab_size: Upper bound of all ids, exclusive.

    Raises:
        DloError: If the folder cannot be written to, or an id is not below ``vocab_size``.
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
            if largest >= vocab_size:  # Its highest bit could collide with the target flag.
                raise DloError(
                    f"token ids must be below the tokenizer's vocabulary size {vocab_size}, got {largest}; correct the"
                    " tokenizer, which returns ids without a token"
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


def verify_checksum(path: Path) -> None:
    """Verifies the checksum of a cache file.

    Raises:
        DamagedTokenCache: If any byte of the file has changed.
    """
    expected = _read_header(path)["crc32"]
    crc = 0
    with open(path, "rb") as file:
        file.seek(_HEADER)
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    if crc != expected:
        raise DamagedTokenCache(path, "is damaged: its checksum is wrong")


class _Body:
    """Writes the bytes after the header, and sums their size and checksum."""

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
        raise DamagedTokenCache(path, "is not of this format")
    if len(head) < _HEADER or hashlib.sha256(head[40:]).digest() != head[8:40]:
        raise DamagedTokenCache(path, "has a damaged header")
    header: dict[str, Any] = json.loads(head[40:])
    size = path.stat().st_size
    if size != header["size"]:
        raise DamagedTokenCache(path, f"is truncated: {size} of {header['size']} bytes")
    return header
