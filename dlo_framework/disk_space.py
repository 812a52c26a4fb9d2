"""Free space of disks, and the reasons of a refused write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from dlo_framework.units import format_bytes

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
