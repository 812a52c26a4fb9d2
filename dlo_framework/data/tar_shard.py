"""Random access to samples in tar files in WebDataset's layout: members ``KEY.SUFFIX``, those of a sample in a row.

The headers are read once; the offsets and sizes are then stored in an index file. Nothing is extracted to a file
system, so that names and links of a hostile archive do nothing.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from dlo_framework.data.remote import ByteFile
from dlo_framework.errors import DloError


class TarMember(NamedTuple):
    """File in a tar.

    Attributes:
        key: Name of its sample: its path up to the first dot of the file's name.
        suffix: Rest of the name, in lower case, without the dot: ``jpg``, ``tokens.npy``.
        offset: Offset of its first byte.
        size: Size in bytes.
    """

    key: str
    suffix: str
    offset: int
    size: int


def scan_tar(file: ByteFile) -> Iterator[TarMember]:
    """Yields the regular files of a tar, in their order; reads all headers.

    Raises:
        DloError: If it is not an uncompressed tar, or it is truncated.
    """
    try:
        with tarfile.open(fileobj=io.BufferedReader(SeekableBytes(file), 1 << 20), mode="r:") as tar:
            for member in tar:
                if not member.isreg() or member.issparse():
                    continue
                if member.size < 0 or member.offset_data + member.size > file.size:
                    raise DloError(f"{file.name} must have the bytes of {member.name!r}, got a truncated file")
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                yield TarMember(key, suffix.lower(), member.offset_data, member.size)
    except tarfile.TarError as error:
        raise DloError(f"{file.name} must be a readable, uncompressed tar file, got {error}") from error


class SeekableBytes(io.RawIOBase):
    """Readable file object of a :class:`dlo_framework.data.remote.ByteFile`.

    Args:
        file: File to read.
    """

    def __init__(self, file: ByteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position, and returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads into a buffer; returns the number of bytes."""
        content = self._file.read(self._at, min(len(buffer), max(0, self._file.size - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
