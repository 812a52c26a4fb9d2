"""Fast process of ``dlo``, or of a script that trains, for tests: started in a tenth of a second.

It differs from ``dlo`` in a shell in that torch and Lightning are imported already, in the server from which the
process is forked (see :mod:`dlo_framework.testing.spawn`). So tests of a command's imports start a new interpreter.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import types
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from dlo_framework.testing.spawn import process_context
from support.forked_ranks import serve_ranks


class DloProcess:
    """Running process of ``dlo``, with the methods of ``subprocess.Popen`` that tests use.

    Args:
        words: Arguments after ``dlo``; or the path of a Python script, and its arguments.
        folder: Working directory of the process.
        environment: Environment variables of the process.

    Attributes:
        stdout: Text stream to read the standard output from.
        stderr: Text stream to read the standard error from.
    """

    def __init__(self, words: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.args = ["dlo", *words]
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        try:
            context = process_context()
            work = _Work(words, str(folder), environment, writers, _server_address(context))
            self._process = context.Process(target=_run, args=(work,))
            self._process.start()
        finally:
            for writer in writers:
                os.close(writer)
        self.stdout: IO[str] = os.fdopen(readers[0], encoding="utf-8", errors="replace")
        self.stderr: IO[str] = os.fdopen(readers[1], encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code; negative for a signal, None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit code; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code; raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end, and returns the rest of the standard output and error."""
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
        for thread in threads:  # Until the streams end, which children of the process may keep open.
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return found[0], found[1]

    def send_signal(self, signum: int) -> None:
        """Sends the process a signal."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()


class _Work:
    """Arguments of the process; its pipes are sent as descriptors."""

    def __init__(
        self, words: list[str], folder: str, environment: dict[str, str], pipes: Any, server: str | None
    ) -> None:
        self.words, self.folder, self.environment, self.pipes, self.server = words, folder, environment, pipes, server

    def __reduce__(self) -> tuple[Any, ...]:
        pipes = [DupFd(number) for number in self.pipes]
        return _Work, (self.words, self.folder, self.environment, pipes, self.server)


def _server_address(context: Any) -> str | None:
    """Returns the address of the server from which this process's processes are forked; None for other methods."""
    if context.get_start_method() != "forkserver":
        return None
    forkserver.ensure_running()
    server: Any = forkserver._forkserver
    return str(server._forkserver_address)


def _keep_server(address: str) -> None:
    """Has the processes of this process, such as the ranks of ``dlo parity``, forked from the server it comes from.

    ``multiprocessing`` (Python 3.11 to 3.13) would start another, which imports everything again.
    """
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server.ensure_running = lambda: None


def _run(work: _Work) -> None:
    """Runs ``dlo`` in the new process."""
    gc.freeze()
    for number, pipe in zip((1, 2), work.pipes, strict=True):
        descriptor = pipe.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    if work.server is not None:
        _keep_server(work.server)
    multiprocessing.set_start_method(None, force=True)  # Loader workers are forked from here, not from the server.
    os.chdir(work.folder)
    os.environ.clear()
    os.environ.update(work.environment)
    sys.path[:0] = [entry for entry in work.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_script = work.words[0].endswith(".py")
    sys.argv = work.words if is_script else [str(Path(sys.executable).with_name("dlo")), *work.words]
    # Lightning starts the other ranks with the main module's name, if it has one.
    sys.modules["__main__"] = types.ModuleType("__main__")
    from dlo_framework.cli.main import main

    run = _run_script if is_script else main
    serve_ranks(run)
    try:
        code = run()
    finally:
        atexit._run_exitfuncs()  # multiprocessing's processes do not call them
    sys.exit(code)


def _run_script() -> int:
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0
