"""Atomic file writes: to a temporary file beside the path, synced, and renamed over it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from dlo_framework.errors import DloError

#: Ending of the temporary file, which no file of a user has: leftovers with it are removed.
PARTIAL = ".dlo-partial"

#: Errors of file systems that cannot sync a folder (CIFS, some FUSE ones).
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextlib.contextmanager
def open_atomic(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yields a temporary path beside ``path``, which is renamed to it at the end, or removed after an error.

    Args:
        path: Path of the file; its folder is created.
        shared: Whether to let several processes write it at once: each uses a name of its own, and the last one wins.

    Raises:
        OSError: if it cannot be written.
    """
    own = f".{uuid4().hex}" if shared else ""
    partial = path.with_name(f"{path.name}{own}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):  # as when the folder is missing
            partial.unlink()


def write_atomic(path: Path, content: bytes | str) -> None:
    """Writes a file atomically.

    Args:
        path: Path of the file; its folder is created.
        content: Content of the file; text is written as UTF-8.

    Raises:
        DloError: if it cannot be written.
    """
    try:
        with open_atomic(path) as partial:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise DloError(f"cannot write {path}: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Makes a rename in ``folder`` durable across a power cut, if the file system supports it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
