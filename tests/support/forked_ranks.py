"""Fast ranks of a `dlo` that is started by :class:`~support.dlo_process.DloProcess`.

``dlo fit`` on two devices starts a new Python for each further rank, which imports torch and Lightning for itself. Here
ranks are forked from a copy of the process that was made before it did anything, in which both are imported.
"""

from __future__ import annotations

import array
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

_SET_CHILD_SUBREAPER = 36  # Of prctl(2).
_LENGTH = 1 << 20


def serve_ranks(main: Callable[[], int]) -> None:
    """Makes Lightning's launcher fork the ranks that it starts in this process.

    Call it once, before the process does anything, and while it has a single thread. Lightning (2.6) starts ranks by
    ``subprocess.Popen`` of its module, which is replaced in this process.

    Args:
        main: Function of a rank, which gets its arguments from ``sys.argv`` and returns the exit code.
    """
    from lightning.pytorch.strategies.launchers import subprocess_script

    # A rank becomes this process's child, as one that it has started: the process between the two ends at once.
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        mine.close()
        _serve(its, main)
    its.close()

    def start(command: Sequence[str], env: Mapping[str, str], cwd: str | None = None) -> Any:
        if cwd is not None or "-m" in command[:2]:
            return subprocess.Popen(command, env=env, cwd=cwd)
        return _ForkedRank(mine, command, env)

    module: Any = types.ModuleType("subprocess")
    module.Popen = start
    subprocess_script.subprocess = module


class _ForkedRank(subprocess.Popen[bytes]):
    """A rank that was forked, with the methods of ``Popen`` for a process that was started.

    It relies on what ``Popen`` of Python 3.11 and 3.12 keeps of a process: its id, its exit code, and a lock.
    """

    def __init__(self, server: socket.socket, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.args, self.returncode = command, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        streams = array.array("i", (1, 2))
        asked = pickle.dumps((list(command[1:]), dict(environment), os.getcwd()))
        server.sendmsg([asked], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        self.pid = int(server.recv(64))
        self._child_created = True


def _serve(asked: socket.socket, main: Callable[[], int]) -> NoReturn:
    """Forks a rank for each message, until the process that sends them is gone."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # A signal to the whole group is not for this one.
        signal.signal(signum, signal.SIG_IGN)
    while True:
        message, ancillary, _, _ = asked.recvmsg(_LENGTH, socket.CMSG_SPACE(2 * array.array("i").itemsize))
        if not message:
            os._exit(0)
        streams = array.array("i", ancillary[0][2])
        between = os.fork()
        if between == 0:
            rank = os.fork()
            if rank == 0:
                _run_rank(asked, message, streams, main)
            asked.send(str(rank).encode())
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in streams:
            os.close(descriptor)


def _run_rank(asked: socket.socket, message: bytes, streams: Sequence[int], main: Callable[[], int]) -> NoReturn:
    """Runs one rank, and ends its process with the exit code."""
    import atexit

    asked.close()
    for number, descriptor in enumerate(streams, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    arguments, environment, folder = pickle.loads(message)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    code: Any = 1
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
