"""A run's lock: one job at a time trains in a run's folder.

A file ``run.lock.<n>`` in the folder names the process that holds it, which touches it every few seconds. Whoever wants
the lock of a process that is dead creates the file of the next number, which only one can. Two things have to hold on
the folder's file system: a hard link (or an exclusive creation) succeeds once, and other hosts see new times of a file
within half a minute.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from dlo_framework.errors import DloError

NAME = "run.lock"
#: Seconds from one touch of a lock to the next, and without one until its process counts as dead on another host.
BEAT, DEAD = 10.0, 60.0
#: Seconds in which two jobs that make a run at the same time see each other.
_SETTLE = 1.5

_held: list[RunLock] = []


class RunLock:
    """The lock of a run's folder, held by this process until it ends.

    Args:
        run: Folder of the run.
    """

    def __init__(self, run: Path) -> None:
        self.run, self.pid = run, os.getpid()
        self._path: Path | None = None
        self._stop = threading.Event()

    def acquire(self) -> None:
        """Takes the lock; that of a dead process too.

        Raises:
            DloError: If another process holds it.
        """
        number, path = _newest(self.run)
        if path is not None:
            _refuse_if_alive(self.run, path)
        own = self.run / f"{NAME}.{number + 1}"
        if not _create(own, json.dumps(_this_process())):
            _refuse_if_alive(self.run, own)
            raise DloError(f"{self.run} was locked by another process at the same time; start this one again")
        try:
            for other in self.run.glob(f"{NAME}.*"):  # Taken and given back meanwhile, the numbers begin again.
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
        """Gives the lock back."""
        self._stop.set()
        if self in _held:
            _held.remove(self)
        if self._path is not None and os.getpid() == self.pid:
            with contextlib.suppress(OSError):  # A folder that has gone, or a disk, holds no lock either.
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
                # This process was stopped for so long that another one has taken the run over.
                print(f"dlo: another process has taken over {self.run}; this one ends", file=sys.stderr, flush=True)
                os._exit(1)
            except OSError:  # The file system is away for a moment, or full.
                continue


def hold(run: Path) -> RunLock:
    """Takes the lock of a run's folder for as long as this process lives; once is enough.

    Raises:
        DloError: If another process holds it.
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
    """Gives all locks of this process back; called as it ends."""
    for lock in list(_held):
        lock.release()


def check_free(run: Path) -> None:
    """Raises a DloError if another process holds a run's lock."""
    _, path = _newest(run)
    if path is not None:
        _refuse_if_alive(run, path)


def check_only_starter(run: Path, others: list[Path]) -> None:
    """Checks that no other job has started a run of the same name at the same time.

    Each job locks its run before it looks for others. Of two, the one with the lower number waits to see whether the
    other one gives way.

    Args:
        run: Run that this process has made, and holds.
        others: All runs of that name.

    Raises:
        DloError: If another one has.
    """
    own = int(run.name.removeprefix("version_"))
    rivals = [path for path in others if path.resolve() != run.resolve() and _newest(path)[1] is not None]
    if any(int(path.name.removeprefix("version_")) > own for path in rivals):
        time.sleep(_SETTLE)
    for path in rivals:
        check_free(path)


def _newest(run: Path) -> tuple[int, Path | None]:
    """Returns the highest number of a lock in a run's folder, and its file; -1 and None where there is none."""
    found = {}
    for path in run.glob(f"{NAME}.*"):
        number = path.name.removeprefix(f"{NAME}.")
        if number.isdigit():
            found[int(number)] = path
    return max(found.items(), default=(-1, None))


def _create(path: Path, text: str) -> bool:
    """Creates a file with its content at once; returns False if it is there already."""
    draft = path.with_name(f".{NAME}-{uuid4().hex}")
    try:
        draft.write_text(text)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError:  # No hard links on this file system.
            try:
                with open(path, "x") as file:
                    file.write(text)
            except FileExistsError:
                return False
        return True
    except OSError as error:
        raise DloError(f"cannot lock the run {path.parent}: {error.strerror}; choose another with --run.dir") from error
    finally:
        draft.unlink(missing_ok=True)


def _refuse_if_alive(run: Path, path: Path) -> None:
    try:
        holder = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return  # Given back, or left half written by a process that was killed as it began.
    if holder.get("pid") == os.getpid() and holder.get("start") == _start_of(os.getpid()):
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
    """Returns whether a lock's process lives; of another host's, it waits for a touch."""
    here = _this_process()
    if holder.get("machine") == here["machine"]:
        return holder.get("start") == _start_of(int(holder["pid"]))
    said, first = False, None
    while True:
        try:
            touched = path.stat().st_mtime
        except FileNotFoundError:
            return False
        if first is not None and touched != first:
            return True
        first = touched
        if _file_systems_time(run) - touched > DEAD:
            return False
        if not said:
            print(
                f"dlo: {run} is locked by process {holder['pid']} on {holder['host']}; waiting up to {DEAD:g} s to see"
                " whether that is alive",
                file=sys.stderr,
            )
            said = True
        time.sleep(1.0)


def _file_systems_time(run: Path) -> float:
    """Returns the time of the clock that stamps files: a server's may differ from this host's."""
    probe = run / f".{NAME}-{uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "start": _start_of(pid),
        "machine": _machine(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
    }


def _machine() -> str:
    """Returns what names the set of processes that this one can see: a boot of a host, and a container in it."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _start_of(pid: int) -> str:
    """Returns when a process has started, in the system's own terms; empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return ""
    try:  # No such files here (macOS): its number has to do.
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return str(pid)
