"""How many files and connections a process may have open at once."""

from __future__ import annotations

import os
import resource

#: For what a process opens later: checkpoints, data, logs, libraries.
RESERVE = 256


def lacking(connections: int) -> tuple[int, int] | None:
    """Makes room for connections, where there is none by raising the soft limit to the hard one.

    Nothing is reserved: what else the process opens takes from the same room, which is why more is asked for.

    Args:
        connections: how many files and connections will be opened, beside :data:`RESERVE` more.

    Returns:
        None if there is room; else how many files may be open, and how many would have to be.
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
