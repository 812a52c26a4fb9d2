"""Process of one trial: ``dlo fit`` in a fresh interpreter, which asks its worker after each validation.

The worker and the process talk through two pipes, one JSON object a line: the process writes a report, the worker
answers whether to stop. So the process imports nothing of the search, and the worker nothing of torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dlo_framework import runs
from dlo_framework.atomic_file import write_atomic
from dlo_framework.process_setup import end_with_parent
from dlo_plugins.sweep.worker_pipe import PIPES

CONFIG, LOG = "trial.yaml", "trial.log"
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


def write_trial_config(folder: Path, config: dict[str, Any]) -> Path:
    """Writes a trial's config into its folder; returns the file."""
    path = folder / CONFIG
    write_atomic(path, yaml.safe_dump(config, sort_keys=False))
    return path


class TrialProcess:
    """Process of one trial, started at once.

    Args:
        words: Arguments of ``dlo``.
        folder: Folder of the trial, for the log.
        environment: Environment of the process.
    """

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        theirs, ours = os.pipe()
        mine, they_write = os.pipe()
        self._answers, self._reports, self._rest = ours, mine, b""
        # With SIGTERM it saves a checkpoint; elsewhere than on Linux it notices at its next validation.
        end_with_this_one = end_with_parent(os.getpid(), signal.SIGTERM)
        with open(folder / LOG, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dlo_framework", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, PIPES: f"{theirs},{they_write}", "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs, they_write),
                preexec_fn=end_with_this_one,
            )
        os.close(theirs)
        os.close(they_write)

    def wait(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
        """Answers the process's reports until it ends; returns its exit code, negative for a signal.

        Args:
            answer: Function that returns the answer to a report.
        """
        try:
            while True:
                ended = self.process.poll() is not None
                ready, _, _ = select.select([self._reports], [], [], 0.0 if ended else _POLL)
                if ready and self._read(answer):
                    continue
                if ended:
                    return int(self.process.returncode)
                if ready:  # The process has closed its end.
                    return int(self.process.wait())
        finally:
            os.close(self._reports)
            os.close(self._answers)

    def _read(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
        """Reads what the process has written, and answers each line; returns False at the end."""
        content = os.read(self._reports, 65536)
        if not content:
            return False
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            reply = json.dumps(answer(json.loads(line))).encode() + b"\n"
            with contextlib.suppress(BrokenPipeError):  # The process has ended.
                os.write(self._answers, reply)
        return True

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Asks the process to save a checkpoint and end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)


def last_error(folder: Path) -> str:
    """Returns the last error in a trial's log, or its last line."""
    try:
        lines = (folder / LOG).read_text(errors="replace").splitlines()[-400:]
    except FileNotFoundError:
        return "no log"
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["an empty log"])[-1][:500]
