"""Lock of a run's folder: one job at a time trains in it.

A file ``run.lock.<n>`` in the folder names the process that holds it, which touches it every few seconds. To take over
a dead process's lock, a process creates the file of the next number, which only one can. The folder's file system must
guarantee two things: a hard link (or an exclusive creation) succeeds once, and other hosts see a file's new
modification time within half a minute.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError
from dlo_framework.process_identity import create_once, file_system_time, machine_id, start_time, this_process

NAME = "run.lock"
#: Seconds between touches of a lock, and without a touch until its process counts as dead on another host.
BEAT, DEAD = 10.0, 60.0
#: Seconds within which two jobs that create a run at the same time see each other.
_SETTLE = 1.5

_held: list[RunLock] = []


class RunLock:
    """Lock of a run's folder, held by this process until it ends.

    Args:
        run: Folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.pid = run, os.getpid()
        self._path: Path | None = None
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Takes the lock, also that of a dead process.

        Raises:
            DloError: if another process holds it.
        """
        number, path = _newest(self.run)
        if path is not None:
            _refuse_if_alive(self.run, path)
        own = self.run / f"{NAME}.{number + 1}"
        if not _create(own, json.dumps(this_process())):
            _refuse_if_alive(self.run, own)
            raise DloError(f"another process has locked {self.run} at the same time; start this one again")
        try:
            for other in self.run.glob(f"{NAME}.*"):  # If it was taken and released meanwhile, the numbers restart.
                if other not in (own, path):
                    _refuse_if_alive(self.run, other)
        except DloError:
            own.unlink(missing_ok=True)
            raise
        self._path = own
        if path is not None:
            path.unlink(missing_ok=True)
        _held.append(self)
        threading.Thread(target=self._beat, name="run-lock", daemon=True).start()

    def release(self) -> None:
        """Releases the lock."""
        self._stop.set()
        if self in _held:
            _held.remove(self)
        if self._path is not None and os.getpid() == self.pid:
            with contextlib.suppress(OSError):  # If the folder or the disk is gone, so is the lock.
                self._path.unlink(missing_ok=True)
        self._path = None

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            path = self._path
            if path is None:
                return
            try:
                os.utime(path)
            except FileNotFoundError:
                if self._stop.is_set() or not self.run.is_dir():
                    return
                # This process was suspended for so long that another one has taken over the run.
                print(f"dlo: another process has taken over {self.run}; this one exits", file=sys.stderr, flush=True)
                os._exit(1)
            except OSError:  # The file system is temporarily unavailable, or full.
                continue


def lock_run(run: Path) -> RunLock:
    """Locks a run's folder until this process ends; further calls do nothing.

    Raises:
        DloError: if another process holds it.
    """
    for lock in _held:
        if lock.run == run.resolve() and lock.pid == os.getpid():
            return lock
    lock = RunLock(run.resolve())
    lock.acquire()
    if not _registered:
        atexit.register(release_all)
        _registered.append(True)
    return lock


_registered: list[bool] = []


def release_all() -> None:
    """Releases all locks of this process; called at exit."""
    for lock in list(_held):
        lock.release()


def check_free(run: Path) -> None:
    """Refuses a run whose lock another process holds."""
    _, path = _newest(run)
    if path is not None:
        _refuse_if_alive(run, path)


def is_held(run: Path) -> bool:
    """Returns whether a live process holds a run's lock, without waiting.

    A process on another host counts as alive until its lock has not been touched for ``DEAD`` seconds.
    """
    _, path = _newest(run)
    if path is None:
        return False
    try:
        holder = json.loads(path.read_text())
        if holder.get("machine") == machine_id():
            return bool(holder.get("start") == start_time(int(holder["pid"])))
        return file_system_time(run) - path.stat().st_mtime <= DEAD
    except (FileNotFoundError, json.JSONDecodeError):
        return False  # Released, or half written by a process that was killed as it began.


def check_only_starter(run: Path, others: list[Path]) -> None:
    """Checks that no other job has started a run of the same name at the same time.

    Each job locks its run before it looks for others. Of two, the one with the lower number waits for the other one to
    release its lock.

    Args:
        run: Run that this process has created and locked.
        others: All runs of that name.

    Raises:
        DloError: if another job has started one.
    """
    own = int(run.name.removeprefix("version_"))
    rivals = [path for path in others if path.resolve() != run.resolve() and _newest(path)[1] is not None]
    if any(int(path.name.removeprefix("version_")) > own for path in rivals):
        time.sleep(_SETTLE)
    for path in rivals:
        check_free(path)


def _newest(run: Path) -> tuple[int, Path | None]:
    """Returns the highest number of a lock in a run's folder, and its file; -1 and None if there is none."""
    found = {}
    for path in run.glob(f"{NAME}.*"):
        number = path.name.removeprefix(f"{NAME}.")
        if number.isdigit():
            found[int(number)] = path
    return max(found.items(), default=(-1, None))


def _create(path: Path, text: str) -> bool:
    """Creates a file with its content atomically; returns False if it exists."""
    try:
        return create_once(path, text)
    except OSError as error:
        raise DloError(f"cannot lock the run {path.parent}: {error.strerror}; choose another with --run.dir") from error


def _refuse_if_alive(run: Path, path: Path) -> None:
    try:
        holder = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return  # Released, or half written by a process that was killed as it began.
    if holder.get("pid") == os.getpid() and holder.get("start") == start_time(os.getpid()):
        return
    if not _is_alive(run, path, holder):
        return
    job = f" (SLURM job {holder['job']})" if holder.get("job") else ""
    raise DloError(
        f"a run must be trained by one job at a time, got a second one for {run}: process {holder['pid']} on"
        f" {holder['host']}{job} trains it; wait until it has ended, or start another run (another --run.name, or no"
        " --ckpt_path)"
    )


def _is_alive(run: Path, path: Path, holder: dict[str, Any]) -> bool:
    """Returns whether a lock's process is alive; if it is on another host, waits for a touch."""
    here = this_process()
    if holder.get("machine") == here["machine"]:
        return holder.get("start") == start_time(int(holder["pid"]))
    said, first = False, None
    while True:
        try:
            touched = path.stat().st_mtime
        except FileNotFoundError:
            return False
        if first is not None and touched != first:
            return True
        first = touched
        if file_system_time(run) - touched > DEAD:
            return False
        if not said:
            print(
                f"dlo: {run} is locked by process {holder['pid']} on {holder['host']}; waiting up to {DEAD:g} s to see"
                " whether it is alive",
                file=sys.stderr,
            )
            said = True
        time.sleep(1.0)
