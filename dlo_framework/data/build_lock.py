"""Builds a file once for all processes of all nodes, under a lock file; no collective waits for the builder.

The lock ``NAME.lock.<n>`` beside the file names the process that builds, which touches it every few seconds. The others
wait and say so. If the builder dies, one of them takes over by creating the file of the next number, which only one
can. A process that was suspended and taken over meanwhile does no harm: a file is built under a temporary name and
renamed, and both builders write the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError
from dlo_framework.process_identity import create_once, file_system_time, start_time, this_process

#: Seconds between touches of a lock, and without a touch until its process counts as dead on another host.
BEAT, DEAD = 10.0, 60.0
#: Seconds between looks at the lock of another process, and between messages.
_LOOK, _SAY = 0.5, 60.0


def build_once(path: Path, build: Callable[[], object], what: str, is_built: Callable[[], bool] | None = None) -> bool:
    """Calls ``build`` in one process at a time, until the file is there; returns whether this process called it.

    An error of ``build`` is raised in the process that called it; the next one then tries.

    Args:
        path: File to build; all processes that need it see its folder, which is created.
        build: Function that builds it under a temporary name and renames it.
        what: Description of the work, for messages, such as ``tokenising``.
        is_built: Function that returns whether it is there and complete; None for the existence of ``path``.

    Raises:
        DloError: If the folder cannot be written to.
    """
    ready = is_built or path.is_file
    if ready():
        return False
    said = 0.0
    while True:
        with _held_lock(path) as (mine, holder):
            if mine:
                if ready():
                    return False
                build()
                return True
        if ready():
            return False
        if holder and time.monotonic() - said > _SAY:
            print(
                f"dlo: waiting for process {holder['pid']} on {holder['host']}, which is {what} ({path.name})",
                file=sys.stderr,
                flush=True,
            )
            said = time.monotonic()
        time.sleep(_LOOK)


@contextlib.contextmanager
def _held_lock(path: Path) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Tries to take the lock of a file; yields whether this process holds it, and else the holder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own, holder = _take(path)
    except OSError as error:
        raise DloError(
            f"cannot lock {path}: {error.strerror or error}; set cache_dir to a folder that can be written to"
        ) from error
    if own is None:
        yield False, holder
        return
    ended = threading.Event()
    beat = threading.Thread(target=_touch_until, args=(own, ended), name="build-lock", daemon=True)
    beat.start()
    try:
        yield True, {}
    finally:
        ended.set()
        beat.join()
        own.unlink(missing_ok=True)


def _touch_until(lock: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        with contextlib.suppress(OSError):  # Taken over, or the file system is temporarily unavailable.
            os.utime(lock)


def _take(path: Path) -> tuple[Path | None, dict[str, Any]]:
    """Returns the lock file that this process has created, or None and the process that holds the lock."""
    number, newest = _newest(path)
    if newest is not None:
        holder = _read_holder(newest)
        if holder is None:
            return None, {}
        if _is_alive(newest, holder):
            return None, holder
        print(
            f"dlo: process {holder.get('pid')} on {holder.get('host')} has died without releasing {newest.name};"
            " this process takes over",
            file=sys.stderr,
            flush=True,
        )
    own = path.with_name(f"{path.name}.lock.{number + 1}")
    if not create_once(own, json.dumps(this_process())):
        return None, {}
    if newest is not None:
        newest.unlink(missing_ok=True)
    return own, {}


def _newest(path: Path) -> tuple[int, Path | None]:
    found = {}
    for lock in path.parent.glob(f"{path.name}.lock.*"):
        number = lock.name.rpartition(".")[2]
        if number.isdigit():
            found[int(number)] = lock
    return max(found.items(), default=(-1, None))


def _read_holder(lock: Path) -> dict[str, Any] | None:
    """Returns the process that holds a lock; None if the lock was released."""
    try:
        holder: dict[str, Any] = json.loads(lock.read_text())
    except FileNotFoundError:
        return None
    except ValueError:  # Half written, where the file system has no hard links: its age decides.
        return {"pid": "unknown", "host": "an unknown host"}
    return holder


def _is_alive(lock: Path, holder: dict[str, Any]) -> bool:
    """Returns whether the process of a lock is alive; on another host, whether it has touched the lock recently."""
    if holder.get("machine") == this_process()["machine"]:
        return bool(holder.get("start")) and holder["start"] == start_time(int(holder["pid"]))
    try:
        return file_system_time(lock.parent) - lock.stat().st_mtime < DEAD
    except FileNotFoundError:
        return True  # Released meanwhile: the next look sees it.
