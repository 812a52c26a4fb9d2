"""Process of one trial: ``dlo fit`` in a fresh interpreter, which asks its worker after each validation.

The worker and the process talk through a connection of :mod:`multiprocessing`: the process sends a report, the worker
answers whether to stop. So the process imports nothing of the search, and the worker nothing of torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dlo_framework.run import runs
from dlo_framework.run.process import end_with_parent

CONFIG, LOG = "trial.yaml", "trial.log"
#: Variable of a trial's process with the descriptor of its connection to the worker.
CONNECTION = "DLO_SWEEP_CONNECTION"
#: Seconds between looks at whether the process has ended.
_POLL = 0.2
#: Variables that make a process one of several ranks, or say where these meet: a trial starts its own.
_OF_RANKS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
#: Variables of a run that passes them to its own ranks.
_OF_RUN = (runs.ENVIRONMENT, runs.FOUND, "DLO_LAUNCHER")
#: Variables by which Lightning takes a process for one of SLURM's tasks.
_OF_SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_ID")


def trial_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a trial: this process's, without what makes it a rank of another run.

    Args:
        more: Further variables.
    """
    left_out = {*_OF_RANKS, *_OF_SLURM, *_OF_RUN}
    return {key: value for key, value in os.environ.items() if key not in left_out} | dict(more)


class TrialProcess:
    """Process of one trial, started at once in a session of its own: Ctrl-C reaches it through its worker alone.

    Args:
        words: Arguments of ``dlo``.
        folder: Folder of the trial, for the log.
        environment: Environment of the process.
    """

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # With SIGTERM it saves a checkpoint; elsewhere than on Linux it notices at its next validation.
        end_with_this_one = end_with_parent(os.getpid(), signal.SIGTERM)
        with open(folder / LOG, "ab") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dlo_framework", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, CONNECTION: str(theirs.fileno()), "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs.fileno(),),
                preexec_fn=end_with_this_one,
                start_new_session=True,
            )

    def wait(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
        """Answers the process's reports until it ends; returns its exit code, negative for a signal.

        Args:
            answer: Function that returns the answer to a report.
        """
        with self._connection as worker:
            while worker.poll(_POLL) or self.process.poll() is None:
                if not worker.poll():
                    continue
                try:
                    report = worker.recv()
                except (EOFError, OSError):  # The process has closed its end.
                    break
                reply = answer(report)
                with contextlib.suppress(OSError):  # It has ended.
                    worker.send(reply)
        return int(self.process.wait())

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Asks the process to save a checkpoint and end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)


def open_connection() -> Connection | None:
    """Returns the connection of this process to the worker that has started it; None if none has."""
    descriptor = os.environ.pop(CONNECTION, "")
    return Connection(int(descriptor)) if descriptor else None


def ask_worker(worker: Connection, report: dict[str, Any]) -> dict[str, Any]:
    """Sends a report to the worker and returns the answer; ``lost`` if it has died."""
    try:
        worker.send(report)
        answer: dict[str, Any] = worker.recv()
    except (EOFError, OSError):
        return {"stop": False, "lost": True}
    return answer


def last_error(folder: Path) -> str:
    """Returns the last error in a trial's log, or its last line."""
    try:
        lines = (folder / LOG).read_text(errors="replace").splitlines()[-400:]
    except FileNotFoundError:
        return "no log"
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["an empty log"])[-1][:500]
