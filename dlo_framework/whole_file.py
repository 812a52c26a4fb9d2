"""Files that are there whole, or as they were before: written beside their place, synced, renamed over it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from dlo_framework.errors import DloError

#: What is written beside its place ends in this.
PARTIAL = ".partial"

#: What file systems that cannot sync a folder (CIFS, some of FUSE's) answer.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextlib.contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Gives a path to write to beside ``path``, which takes its place at the end; nothing is left of an attempt.

    Args:
        path: of the file; its folder is made.
        shared: whether several processes may write it at once: each does under a name of its own, and the last stays.

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
        with contextlib.suppress(OSError):  # as where there is no such folder
            partial.unlink()


def write_whole(path: Path, content: bytes | str) -> None:
    """Writes a file, whole or not at all.

    Args:
        path: of the file; its folder is made.
        content: text is written as UTF-8.

    Raises:
        DloError: if it cannot be written.
    """
    try:
        with whole_file(path) as partial:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise DloError(f"cannot write {path}: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Makes a rename in ``folder`` survive a power cut, where the file system has a way to."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
