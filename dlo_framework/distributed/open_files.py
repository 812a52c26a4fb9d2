"""Limit of a process's open files and connections, raised where it is too low."""

from __future__ import annotations

import os
import resource

#: Number of files to leave for later: checkpoints, data, logs, libraries.
RESERVE = 256


def raise_open_files_limit(connections: int) -> tuple[int, int] | None:
    """Raises the soft limit of open files to the hard one where it is too low for a number of connections.

    Nothing is reserved: other files of the process count against the same limit, so that :data:`RESERVE` more are
    required.

    Args:
        connections: Number of files and connections that will be opened.

    Returns:
        None if the limit is high enough; else the limit and the number that is needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _open_files() + connections + RESERVE
    if soft == resource.RLIM_INFINITY or soft >= need:
        return None
    aim = hard if hard != resource.RLIM_INFINITY else need
    if aim > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (aim, hard))
            soft = aim
        except (ValueError, OSError):  # The system has a limit of its own below the hard one, as macOS has.
            pass
    return None if soft >= need else (soft, need)


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0
