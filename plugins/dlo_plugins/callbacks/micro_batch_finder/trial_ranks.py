"""Search whose trials run in processes of their own, which may die.

Each rank starts one process, a repetition of its own program as the same rank of a second run. Together these train on
growing batches until one of them is out of memory, by an error or by a signal. The ranks, which have not built their
model yet, agree on the size that did not fit and start the next processes, which know it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer

from dlo_framework import runs
from dlo_framework.distributed.control_group import control_group
from dlo_framework.distributed.launcher import LAUNCHER
from dlo_framework.errors import DloError, mark_agreed
from dlo_framework.process_setup import end_with_parent
from dlo_plugins.callbacks.micro_batch_finder.trial_events import ORDER, TrialOrder, read_events

#: Seconds between two exchanges of the ranks.
_POLL = 0.25
#: Exchanges to wait, after a process has failed, for the process whose end is the cause.
_CAUSE = 40
#: Variables of this run that would make a trial process another rank of it, or let it answer in its place.
_OF_RUN = (runs.ENVIRONMENT, runs.FOUND, LAUNCHER, "DLO_SWEEP_PIPES", "TORCHELASTIC_RESTART_COUNT")


class State(IntEnum):
    """State of a rank's trial process."""

    RUNNING = 0
    DONE = 1
    #: Out of memory, or ended by a signal while it tried a size.
    LOST = 2
    #: Ended by another error.
    FAILED = 3
    #: Without an event for too long.
    SILENT = 4


@dataclass
class Found:
    """Result of a search.

    Attributes:
        present: Samples of a micro-batch of the loader's.
        limit: Largest size that may be tried.
        largest: Largest size that fits; 0 if none does.
        outcomes: Whether each tried size fits, in the order of the trials.
        details: Details of each tried size: ``peak_bytes`` of the rank with most, or ``ended``, how a process ended.
    """

    present: int = 0
    limit: int = 0
    largest: int = 0
    outcomes: dict[int, bool] = field(default_factory=dict)
    details: dict[int, dict[str, Any]] = field(default_factory=dict)


def repeated_command() -> list[str]:
    """Returns the command that repeats this program.

    Raises:
        DloError: The program is a notebook, or a function that multiprocessing calls in this process.
    """
    if _IS_INTERACTIVE or multiprocessing.parent_process() is not None:
        got = "a notebook" if _IS_INTERACTIVE else "a process of multiprocessing"
        raise DloError(
            f"MicroBatchFinder: the run must be a program that can be repeated, for trials in processes of their own,"
            f" got {got}; run it as a script, set command, or remove the callback"
        )
    return list(_basic_subprocess_cmd())


def search_in_processes(trainer: Trainer, *, command: Sequence[str], timeout: float) -> Found:
    """Searches for the largest micro-batch; called on all ranks, before the model is on the device.

    Args:
        trainer: Trainer whose ranks have met.
        command: Command that repeats the run as this rank.
        timeout: Seconds that a trial process may take for its start, or for one size.

    Raises:
        DloError: On all ranks: a process has failed for another reason than memory, or reports nothing in time.
    """
    found, group = Found(), control_group(trainer)
    while True:
        port = _agree(group, _free_port())[0]
        process = TrialProcess(command, found.outcomes, port, timeout)
        try:
            state = _wait(process, group)
            reports = _agree(group, (process.events(), process.ending(), process.state()))
        finally:
            process.end()
        _merge(found, [events for events, _, _ in reports])
        if state == State.DONE:
            found.largest = next(event["found"] for event in reports[0][0] if event["kind"] == "done")
            return found
        lost = _lost_size(found, reports) if state == State.LOST else None
        if lost is None:
            rank, text = next((rank, text) for rank, (_, text, own) in enumerate(reports) if own == state)
            raise mark_agreed(
                DloError(
                    f"MicroBatchFinder: trials must train on the run's data as the run does, got from the process of"
                    f" rank {rank}: {text}; run without the callback to see the error, or remove it"
                )
            )
        found.outcomes[lost] = False
        found.details[lost] = {"ended": next(text for _, text, own in reports if own == State.LOST)}


def _wait(process: TrialProcess, group: Any) -> State:
    """Waits until the processes of all ranks are done, or one is lost; returns the same on all ranks."""
    failing = 0
    while True:
        states = _agree(group, process.state())
        if State.LOST in states:
            return State.LOST
        if all(state == State.DONE for state in states):
            return State.DONE
        failed = [state for state in states if state in (State.FAILED, State.SILENT)]
        failing += bool(failed)
        if failing > _CAUSE or (failed and len(states) == 1):
            return failed[0]
        time.sleep(_POLL)


def _merge(found: Found, reports: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Adds the sizes that fit on all ranks."""
    begun = [event for events in reports for event in events if event["kind"] == "begin"]
    if begun:
        found.present, found.limit = begun[0]["present"], begun[0]["limit"]
    peaks = [{event["size"]: event["peak_bytes"] for event in events if event["kind"] == "fits"} for events in reports]
    for size in peaks[0]:
        if all(size in own for own in peaks):
            found.outcomes[size] = True
            found.details[size] = {"peak_bytes": max(own[size] for own in peaks)}


def _lost_size(found: Found, reports: Sequence[tuple[Sequence[Mapping[str, Any]], str, State]]) -> int | None:
    """Returns the smallest size that ranks were trying; None if none had begun."""
    tried = [event["size"] for events, _, _ in reports for event in events if event["kind"] == "try"]
    return min((size for size in tried if size not in found.outcomes), default=None)


def _agree(group: Any, value: Any) -> list[Any]:
    """Returns all ranks' values."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


class TrialProcess:
    """Trial process of this rank, started at once.

    Args:
        command: Command of the process.
        known: Outcomes of sizes that are known.
        port: Port on which the processes of all ranks meet.
        timeout: Seconds without an event after which it counts as silent.
    """

    def __init__(self, command: Sequence[str], known: Mapping[int, bool], port: int, timeout: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dlo-trial-"))
        self._events, self._log = self.folder / "events.jsonl", self.folder / "log.txt"
        self._timeout, self._seen, self._since = timeout, 0, time.monotonic()
        order = TrialOrder(str(self._events), known, os.getpid())
        environment = {key: value for key, value in os.environ.items() if key not in _OF_RUN}
        environment |= {ORDER: order.to_text(), runs.SCRATCH: str(self.folder), "PYTHONUNBUFFERED": "1"}
        # The port of torchrun's own store is taken: rank 0 makes one, as without torchrun.
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # A group of processes, with its data loaders' workers, to be ended together.
                preexec_fn=end_with_parent(os.getpid(), signal.SIGKILL),
            )

    def events(self) -> list[dict[str, Any]]:
        """Returns what the process has reported."""
        return read_events(self._events)

    def state(self) -> State:
        """Returns the state of the process."""
        code = self.process.poll()
        kinds = [event["kind"] for event in self.events()]
        if "done" in kinds:
            return State.DONE
        if "out_of_memory" in kinds or (code is not None and code < 0 and "try" in kinds):
            return State.LOST
        if code is not None:
            return State.FAILED
        if len(kinds) != self._seen:
            self._seen, self._since = len(kinds), time.monotonic()
        return State.SILENT if time.monotonic() - self._since > self._timeout else State.RUNNING

    def ending(self) -> str:
        """Returns how the process has ended."""
        error = next((event["error"] for event in self.events() if event["kind"] == "out_of_memory"), None)
        if error is not None:
            return str(error)
        code = self.process.poll()
        if code is None:
            return f"no sign of progress in {self._timeout:g} s (timeout)"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"signal {-code} ({signal.Signals(-code).name})"
        return f"exit code {code}: {self._last_error()}"

    def _last_error(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()[-400:]]
        lines = [line for line in lines if line]
        errors = [line for line in lines if "error" in line.lower()]
        return (errors or lines or ["an empty log"])[-1][:400]

    def end(self) -> None:
        """Kills the process with all that it has started, and removes its files."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def has_memory_limit() -> bool:
    """Returns whether this process's memory is limited by its shell or its container, and not by the machine alone."""
    if sys.platform != "linux":
        return False
    import resource

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    files = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    values = [file.read_text().strip() for file in files if file.exists()]
    return any(value.isdigit() and int(value) < 2**60 for value in values)
