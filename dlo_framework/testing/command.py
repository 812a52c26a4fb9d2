"""``dlo`` as a process of its own that starts in a tenth of a second, for tests that run it a hundred times.

What differs from a shell's ``dlo``: torch and Lightning are imported already, once for all, in the server from which
the process is forked (see :mod:`dlo_framework.testing.spawn`). Tests of what a command imports start a new interpreter.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import types
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from dlo_framework.testing.spawn import process_context


class Started:
    """A ``dlo`` that has been started, with the part of ``subprocess.Popen`` that tests use.

    Args:
        words: after ``dlo``.
        folder: where it runs.
        environment: all its variables.

    Attributes:
        stdout: what it prints, as text, to be read.
        stderr: likewise.
    """

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.args = ["dlo", *words]
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        try:
            work = _Work(words, str(folder), environment, writers)
            self._process = process_context().Process(target=_run, args=(work,))
            self._process.start()
        finally:
            for writer in writers:
                os.close(writer)
        self.stdout: IO[str] = os.fdopen(readers[0], encoding="utf-8", errors="replace")
        self.stderr: IO[str] = os.fdopen(readers[1], encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code; negative for a signal, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; subprocess.TimeoutExpired if there is none in so many seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what is left of its output and of its errors, once it has ended."""
        found = ["", ""]

        def read(number: int, stream: IO[str]) -> None:
            with stream:
                found[number] = stream.read()

        threads = [
            threading.Thread(target=read, args=item, daemon=True) for item in enumerate((self.stdout, self.stderr))
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:  # To their ends: what it has started may hold its pipes.
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return found[0], found[1]

    def send_signal(self, signum: int) -> None:
        """Sends it a signal."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kills it."""
        self._process.kill()


class _Work:
    """What the process is told; its pipes are sent as descriptors."""

    def __init__(self, words: list[str], folder: str, environment: dict[str, str], pipes: Any) -> None:
        self.words, self.folder, self.environment, self.pipes = words, folder, environment, pipes

    def __reduce__(self) -> tuple[Any, ...]:
        return _Work, (self.words, self.folder, self.environment, [DupFd(number) for number in self.pipes])


def _run(work: _Work) -> None:
    """Becomes ``dlo``; runs in the new process."""
    gc.freeze()
    for number, pipe in zip((1, 2), work.pipes, strict=True):
        descriptor = pipe.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    multiprocessing.set_start_method(None, force=True)  # Loaders' workers are forked, not started from this server.
    os.chdir(work.folder)
    os.environ.clear()
    os.environ.update(work.environment)
    sys.path[:0] = [entry for entry in work.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.argv = [str(Path(sys.executable).with_name("dlo")), *work.words]
    # Lightning starts the other ranks with the main module's name, where it has one.
    sys.modules["__main__"] = types.ModuleType("__main__")
    from dlo_framework.cli.main import main

    try:
        code = main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing's own processes leave them out
    sys.exit(code)
