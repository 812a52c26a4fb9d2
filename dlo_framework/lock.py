"""Locks between processes of any hosts: of a run's folder, of a file that is built once, and by the kernel.

A :class:`FileLock` needs two things of a file system: a hard link (or an exclusive creation) succeeds once, and other
hosts see a file's new modification time within half a minute. A :class:`ProcessLock` needs POSIX locks.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import glob
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from dlo_framework.errors import DloError

#: Seconds between touches of a lock, and without a touch until its process counts as dead on another host.
BEAT, DEAD = 10.0, 60.0
#: Seconds within which two jobs that create a run at the same time see each other.
_SETTLE = 1.5
#: Seconds between looks at the lock of another process that builds, and between messages.
_LOOK, _SAY = 0.5, 60.0


# --- identity of processes -------------------------------------------------------------------------------------


def this_process() -> dict[str, Any]:
    """Returns what identifies this process to others, on any host: a JSON object."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "start": start_time(pid),
        "machine": machine_id(),
        "job": os.environ.get("SLURM_JOB_ID", ""),
    }


def machine_id() -> str:
    """Returns an identifier of the processes visible to this one: a boot of a host, and a container in it."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def start_time(pid: int) -> str:
    """Returns the start time of a process, in the system's own units; empty if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return ""
    try:  # No such files here (macOS): the process id must suffice.
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return str(pid)


# --- locks that are files --------------------------------------------------------------------------------------


class FileLock:
    """Lock that is a file ``PATH.<n>``: it names the process that holds it, which touches it every few seconds.

    To take over a dead process's lock, a process creates the file of the next number, which only one can.

    Args:
        path: Path of the lock, without a number.

    Attributes:
        dead: Process whose lock was taken over, as in the file; None if there was none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dead: dict[str, Any] | None = None
        self._own: Path | None = None
        self._pid, self._ended = os.getpid(), threading.Event()

    def newest(self) -> tuple[int, Path | None]:
        """Returns the highest number of the lock's files, and that file; -1 and None if there is none."""
        numbered = ((path.name.removeprefix(f"{self.path.name}."), path) for path in self._files())
        return max(((int(number), path) for number, path in numbered if number.isdigit()), default=(-1, None))

    def _files(self) -> Iterator[Path]:
        return self.path.parent.glob(f"{glob.escape(self.path.name)}.*")

    def take(self) -> dict[str, Any] | None:
        """Takes the lock, also that of a dead process; returns the live process that holds it, None if this one does.

        Raises:
            OSError: The folder cannot be written to.
        """
        number, old = self.newest()
        if old is not None and (holder := self.live_holder(old)) is not None:
            return holder
        self.dead = None if old is None else read_holder(old)
        own = self.path.with_name(f"{self.path.name}.{number + 1}")
        if not _create_once(own, json.dumps(this_process())):
            return self.live_holder(own) or {}
        for other in self._files():  # If it was taken and released meanwhile, the numbers restart.
            if other not in (own, old) and (holder := self.live_holder(other)) is not None:
                own.unlink(missing_ok=True)
                return holder
        if old is not None:
            old.unlink(missing_ok=True)
        self._own = own
        threading.Thread(target=self._touch, name="file-lock", daemon=True).start()
        return None

    def release(self) -> None:
        """Releases the lock."""
        self._ended.set()
        if self._own is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):  # If the folder or the disk is gone, so is the lock.
                self._own.unlink(missing_ok=True)
        self._own = None

    def holder(self) -> dict[str, Any] | None:
        """Returns the live process that holds the lock; None if none does."""
        newest = self.newest()[1]
        return None if newest is None else self.live_holder(newest)

    def live_holder(self, path: Path) -> dict[str, Any] | None:
        """Returns the process that holds a file of the lock, if it lives as far as is known now; else None."""
        holder = read_holder(path)
        try:
            return holder if holder is not None and is_alive(path, holder) else None
        except FileNotFoundError:
            return None  # Released meanwhile.

    def _touch(self) -> None:
        while not self._ended.wait(BEAT):
            own = self._own
            if own is None:
                return
            try:
                os.utime(own)
            except FileNotFoundError:
                if self._ended.is_set() or not own.parent.is_dir():
                    return
                self._lost()
            except OSError:  # The file system is temporarily unavailable, or full.
                continue

    def _lost(self) -> None:
        """Called when another process has taken over, as this one was suspended for too long."""


def read_holder(path: Path) -> dict[str, Any] | None:
    """Returns the process that holds a file of a lock, empty if half written; None if the lock was released."""
    try:
        holder: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:  # Where the file system has no hard links.
        return {}
    return holder


def is_alive(path: Path, holder: dict[str, Any]) -> bool:
    """Returns whether the process of a lock is alive; on another host, whether it has touched the lock recently."""
    if holder.get("machine") == machine_id():
        return bool(holder.get("start")) and holder["start"] == start_time(int(holder["pid"]))
    return _file_system_time(path.parent) - path.stat().st_mtime <= DEAD


def _create_once(path: Path, text: str) -> bool:
    """Creates a file with its content atomically; returns False if it exists."""
    draft = path.with_name(f".{path.name}-{uuid4().hex}")
    try:
        draft.write_text(text)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # The file system has no hard links.
            with open(path, "x") as file:
                file.write(text)
        return True
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)


def _file_system_time(folder: Path) -> float:
    """Returns the time by the clock that stamps files: a server's may differ from this host's."""
    probe = folder / f".clock-{uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


# --- runs ------------------------------------------------------------------------------------------------------

_held: list[RunLock] = []


class RunLock(FileLock):
    """Lock of a run's folder, in which one job at a time trains; held by this process until it ends.

    Args:
        run: Folder of the run.
    """

    def __init__(self, run: Path) -> None:
        super().__init__(run / "run.lock")
        self.run = run

    def acquire(self) -> None:
        """Takes the lock, also that of a dead process.

        Raises:
            DloError: if another process holds it.
        """
        try:
            holder = self.take()
        except OSError as error:
            raise DloError(
                f"cannot lock the run {self.run}: {error.strerror}; choose another with --run.dir"
            ) from error
        if holder is not None:
            raise _taken(self.run, holder)
        atexit.register(self.release)
        _held.append(self)

    def release(self) -> None:
        """Releases the lock."""
        if self in _held:
            _held.remove(self)
        super().release()

    def live_holder(self, path: Path) -> dict[str, Any] | None:
        """Returns the other process that holds a file of the lock; waits to see whether one on another host lives."""
        first: float | None = None
        holder = read_holder(path)
        if not holder or (holder["pid"] == os.getpid() and holder["start"] == start_time(os.getpid())):
            return None  # Released, or half written by a process that was killed as it began.
        with contextlib.suppress(FileNotFoundError):
            while is_alive(path, holder):
                touched = path.stat().st_mtime
                if holder.get("machine") == machine_id() or touched != (first or touched):
                    return holder
                if first is None:
                    _say(
                        f"{self.run} is locked by process {holder['pid']} on {holder['host']}; waiting up to {DEAD:g} s"
                        " to see whether it is alive"
                    )
                first = touched
                time.sleep(1.0)
        return None

    def _lost(self) -> None:
        _say(f"another process has taken over {self.run}; this one exits")
        os._exit(1)


def _taken(run: Path, holder: dict[str, Any]) -> DloError:
    if not holder:
        return DloError(f"another process has locked {run} at the same time; start this one again")
    job = f" (SLURM job {holder['job']})" if holder.get("job") else ""
    return DloError(
        f"a run must be trained by one job at a time, got a second one for {run}: process {holder['pid']} on"
        f" {holder['host']}{job} trains it; wait until it has ended, or start another run (another --run.name, or no"
        " --ckpt_path)"
    )


def lock_run(run: Path) -> RunLock:
    """Locks a run's folder until this process ends; further calls do nothing.

    Raises:
        DloError: if another process holds it.
    """
    for lock in _held:
        if lock.run == run.resolve() and lock._pid == os.getpid():
            return lock
    lock = RunLock(run.resolve())
    lock.acquire()
    return lock


def release_all() -> None:
    """Releases all locks of runs that this process holds; called where a process ends without Python's exit."""
    for lock in list(_held):
        lock.release()


def check_free(run: Path) -> None:
    """Refuses a run whose lock another process holds."""
    holder = RunLock(run).holder()
    if holder is not None:
        raise _taken(run, holder)


def is_held(run: Path) -> bool:
    """Returns whether a live process holds a run's lock, without waiting.

    A process on another host counts as alive until its lock has not been touched for ``DEAD`` seconds.
    """
    return bool(FileLock(RunLock(run).path).holder())


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
    rivals = [path for path in others if path.resolve() != run.resolve() and RunLock(path).newest()[1] is not None]
    if any(int(path.name.removeprefix("version_")) > own for path in rivals):
        time.sleep(_SETTLE)
    for path in rivals:
        check_free(path)


# --- files that are built once ---------------------------------------------------------------------------------


def build_once(path: Path, build: Callable[[], object], what: str, is_built: Callable[[], bool] | None = None) -> bool:
    """Calls ``build`` in one process at a time, until the file is there; returns whether this process called it.

    No collective waits for the builder. If it dies, one of those that wait takes over. A process that was suspended and
    taken over meanwhile does no harm: both builders write the same, under a temporary name, and rename it. An error of
    ``build`` is raised in the process that called it; the next one then tries.

    Args:
        path: File to build; all processes that need it see its folder, which is created.
        build: Function that builds it under a temporary name and renames it.
        what: Description of the work, for messages, such as ``tokenising``.
        is_built: Function that returns whether it is there and complete; None for the existence of ``path``.

    Raises:
        DloError: If the folder cannot be written to.
    """
    ready = is_built or path.is_file
    said = 0.0
    while not ready():
        lock = FileLock(path.with_name(f"{path.name}.lock"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            holder = lock.take()
        except OSError as error:
            raise DloError(
                f"cannot lock {path}: {error.strerror or error}; set cache_dir to a folder that can be written to"
            ) from error
        if holder is None:
            if lock.dead is not None:
                _say(f"{_name(lock.dead)} has died {what} ({path.name}); this process takes over")
            try:
                if ready():
                    return False
                build()
                return True
            finally:
                lock.release()
        if ready():
            return False
        if time.monotonic() - said > _SAY:
            _say(f"waiting for {_name(holder)}, which is {what} ({path.name})")
            said = time.monotonic()
        time.sleep(_LOOK)
    return False


def _say(text: str) -> None:
    print(f"dlo: {text}", file=sys.stderr, flush=True)


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}" if holder else "an unknown process"


# --- locks of the kernel ---------------------------------------------------------------------------------------


class ProcessLock:
    """Lock between processes, also of several hosts, that the kernel releases when its process ends.

    It is a POSIX lock (``lockf``), which NFS 4, GPFS, and Lustre mounted with ``flock`` share among hosts. Threads of
    one process exclude each other too.

    Args:
        path: File of the lock, which is created and stays empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread_lock = threading.Lock()
        self._file = open(path, "a+b")  # noqa: SIM115  # Kept: closing any descriptor of it would release the lock.

    def acquire(self) -> None:
        """Waits for the lock and takes it.

        Raises:
            DloError: The file system has no locks.
        """
        self._thread_lock.acquire()
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
        except OSError as error:
            self._thread_lock.release()
            raise DloError(
                f"{self.path.parent} must be on a file system with POSIX locks, got one without: {error.strerror};"
                " choose another folder, or mount it with locks"
            ) from error

    def release(self) -> None:
        """Releases the lock."""
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._thread_lock.release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock."""
        self.acquire()
        try:
            yield
        finally:
            self.release()
