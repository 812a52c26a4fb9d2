"""Journal of a sweep: a file of Optuna's operations that several processes on several hosts append to.

Optuna's own backend locks with a link that stays when its process is killed, waits 30 seconds for it, and cannot read a
file whose last line was cut off. Here the lock is the kernel's, which ends with its process, and the next writer
removes an incomplete last line: nobody has acted on it, since its writer has not returned.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from dlo_framework.errors import DloError


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
        self._file: Any = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock.

        Raises:
            DloError: The file system has no locks.
        """
        with self._thread_lock:
            if self._file is None:  # Once: closing any descriptor of the file would release the lock.
                self._file = open(self.path, "a+b")  # noqa: SIM115
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX)
            except OSError as error:
                raise DloError(
                    f"sweep: the folder must be on a file system with POSIX locks, got {self.path.parent}:"
                    f" {error.strerror}; choose another --folder, or mount it with locks"
                ) from error
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


class JournalFile(BaseJournalBackend):
    """Backend of Optuna's ``JournalStorage`` that survives the death of any writer at any time.

    Args:
        path: File of the journal; ``path.lock`` beside it is its lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = ProcessLock(path.with_name(f"{path.name}.lock"))
        path.touch()
        self._next, self._offset = 0, 0  # Number and offset of the first line that has not been read.

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Yields the operations from a number on; a last line that is still being written is left out."""
        number, offset = (self._next, self._offset) if log_number_from >= self._next else (0, 0)
        with open(self._path, "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                number, offset = number + 1, offset + len(line)
                self._next, self._offset = number, offset
                if number > log_number_from:
                    yield json.loads(line)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends operations, durably."""
        content = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with self._lock.held(), open(self._path, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(complete_length(file, end))
            file.truncate()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def complete_length(file: Any, end: int, block: int = 4096) -> int:
    """Returns the length of a file's complete lines, which end with a line break.

    Args:
        file: File, open for reading bytes.
        end: Length of the file.
        block: Number of bytes that are read at once, from the end.
    """
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        position = file.read(end - start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0
