"""Atomic file writes: to a temporary file beside the path, synced, and renamed over it; and the space they need."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes

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


# --- free space, and the reasons of a refused write ----------------------------------------------------------


#: Errors of a full or limited disk.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(folder: Path) -> int:
    """Returns the free bytes for ``folder``, or for its nearest existing parent."""
    status = _file_system(folder)
    return status.f_bavail * status.f_frsize


def _file_system(folder: Path) -> os.statvfs_result:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.statvfs(folder)


def find_os_error(error: BaseException | None) -> OSError | None:
    """Returns the operating system's error; after one, torch's zip writer raises a RuntimeError of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def describe_shortage(folder: Path, need: int | None, free: int) -> str:
    """Returns the needed and free bytes as text."""
    return f"{f'need {format_bytes(need)}, ' if need is not None else ''}{format_bytes(free)} free in {folder}"


def explain_refusal(error: OSError, folder: Path, need: int | None) -> str:
    """Returns the reason of a failed write as text: a disk may be short of other things than bytes.

    Args:
        error: Error of the operating system.
        folder: Folder of the file, with the bytes written so far still there.
        need: Bytes needed in total; None if unknown.
    """
    if error.errno == errno.EFBIG:
        return f"{error.strerror}: files of this process are limited to {_largest_file()} (ulimit -f)"
    if error.errno == errno.EDQUOT:
        disk = f"{format_bytes(free_bytes(folder))} free there"
        return f"{error.strerror}: this user's quota in {folder} is used up, with {disk}"
    if error.errno != errno.ENOSPC:
        return error.strerror or str(error)
    status = _file_system(folder)
    if status.f_files and not status.f_favail:
        return f"the inodes of the disk of {folder} are used up; remove some files there"
    free = free_bytes(folder)
    short = need is None or free < need
    return (
        describe_shortage(folder, need, free)
        if short
        else f"{error.strerror}, though {describe_shortage(folder, need, free)}"
    )


def _largest_file() -> str:
    import resource  # not on every system

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return "a smaller size" if limit == resource.RLIM_INFINITY else format_bytes(limit)
