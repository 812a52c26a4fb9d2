"""Workers of a sweep: each claims trials, runs one after the other as ``dlo fit`` in a process of its own, and records
the results. They are threads of ``dlo sweep``, which imports Optuna and not torch.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from dlo_framework.atomic_file import write_atomic
from dlo_framework.errors import DloError
from dlo_plugins.sweep.search_space import apply_values
from dlo_plugins.sweep.sweep_settings import TRIALS, SweepSettings
from dlo_plugins.sweep.trial_process import CONFIG, TrialProcess, last_error, trial_environment
from dlo_plugins.sweep.trial_queue import Claim, TrialQueue, finished_run

#: Seconds between looks at the trials of other workers when none is left to start, and before one is continued.
_WAIT = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
#: Callback that the config of each trial gets.
CALLBACK = "SweepTrial"
#: File of a trial with a line for each validation: value, step, samples, seconds.
REPORTS = "reports.jsonl"
#: Function that answers a report.
Answer = Callable[[dict[str, Any]], dict[str, Any]]
#: Function that runs a trial: it gets the claim, and a function that answers a report, and returns the exit code.
Runner = Callable[[Claim, Answer], int]


def trial_config(settings: SweepSettings, number: int, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a trial: the sweep's with these values, and the callback that reports.

    Raises:
        DloError: A key of the values leads nowhere in the config.
    """
    config = apply_values(settings.config, values)
    trainer = config.setdefault("trainer", None) or {}
    config["trainer"] = trainer
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    init = {"metric": settings.metric, "number": number, "values": values}
    trainer["callbacks"] = [*callbacks, {"class_path": CALLBACK, "init_args": init}]
    return config


def trial_words(settings: SweepSettings, folder: Path, config: dict[str, Any], checkpoint: str = "auto") -> list[str]:
    """Writes a trial's config into its folder, and returns the arguments of ``dlo`` that run it.

    Args:
        settings: Settings of the sweep.
        folder: Folder of the trial.
        config: Config of the trial.
        checkpoint: Checkpoint to start from; that of the trial's newest run by default.
    """
    write_atomic(folder / CONFIG, yaml.safe_dump(config, sort_keys=False))
    words = ["fit", "--config", str(folder / CONFIG), *settings.words, "--run.dir", str(folder.parent)]
    return [*words, "--run.name", folder.name, "--ckpt_path", checkpoint]


class SweepWorkers:
    """Workers of a sweep on this machine; they share its cores and GPUs.

    Args:
        queue: Trials of the sweep.
        jobs: Number of workers, each of which runs one trial at a time.
        waits: Whether to wait for the trials of other processes, and continue those of dead ones, before they end.
        runner: Function that runs a trial; None for a process of ``dlo fit``.
    """

    def __init__(self, queue: TrialQueue, jobs: int = 1, *, waits: bool = True, runner: Runner | None = None) -> None:
        self.queue, self._jobs, self._waits, self._runner = queue, jobs, waits, runner
        self._processes: set[TrialProcess] = set()
        self._signum = 0

    def run(self) -> int:
        """Runs trials until none is left; returns the exit code: 0, or 128 + a signal.

        Raises:
            DloError: The first three trials have failed, or a key of the space leads nowhere in the config.
        """
        previous = {signum: signal.signal(signum, self._on_signal) for signum in _SIGNALS}
        try:
            with ThreadPoolExecutor(self._jobs) as pool:
                workers = [pool.submit(self._work, index) for index in range(self._jobs)]
                while wait(workers, _WAIT).not_done:  # Python handles signals between waits of the main thread.
                    pass
                for worker in workers:
                    worker.result()
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
        return 128 + (signal.SIGINT if self._signum == signal.SIGINT else signal.SIGTERM) if self._signum else 0

    def _work(self, index: int) -> None:
        """Runs trials of one worker until none is left, or a signal has come."""
        environment = environment_of_job(index, self._jobs)
        while not self._signum:
            failure = self.queue.failed_from_the_start()
            if failure is not None:
                raise DloError(
                    f"sweep: the first three trials have failed: {failure}; see {self.queue.folder / TRIALS}, and"
                    " change the config or the space in another --folder"
                )
            claim = self.queue.claim()
            if claim is not None:
                self.run_claim(claim, environment)
            elif not self._waits or not self.queue.unfinished():
                return
            else:
                time.sleep(_WAIT)

    def run_claim(self, claim: Claim, environment: dict[str, str]) -> None:
        """Runs a claimed trial and records its end; one that was asked to stop is left for another process."""
        queue, began = self.queue, time.monotonic()
        try:
            queue.note_start(claim.number)
            answer = functools.partial(self._answer, claim)
            code = self._runner(claim, answer) if self._runner else self._run_process(claim, answer, environment)
            if self._signum:
                return
            if code == 0:
                state = queue.finish(claim.number, finished_run(claim.folder))
            elif code < 0 or code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
                time.sleep(_WAIT)  # A signal to all processes of a job reaches this one too.
                if not self._signum:
                    signum = -code if code < 0 else code - 128
                    self._say(claim, f"its process was ended by signal {signum}; it is continued")
                return
            else:
                queue.fail(claim.number, last_error(claim.folder))
                state = "FAIL"
            self._say(claim, f"{state.lower()} after {time.monotonic() - began:.1f} s{queue.describe(claim.number)}")
        finally:
            queue.release(claim.number)

    def _answer(self, claim: Claim, report: dict[str, Any]) -> dict[str, Any]:
        """Records a validation of a trial; returns whether the trial is to stop."""
        stop = self.queue.report(claim.number, report["step"], report["value"])
        with open(claim.folder / REPORTS, "a") as file:
            file.write(json.dumps({**report, "stop": stop}) + "\n")
        return {"stop": stop}

    def _run_process(self, claim: Claim, answer: Answer, environment: dict[str, str]) -> int:
        """Runs a trial as ``dlo fit``, from the last checkpoint of its run if it has one."""
        settings = self.queue.settings
        words = trial_words(settings, claim.folder, trial_config(settings, claim.number, claim.values))
        process = TrialProcess(words, claim.folder, trial_environment(environment))
        self._processes.add(process)
        try:
            if self._signum:
                process.stop()
            return process.wait(answer)
        finally:
            self._processes.remove(process)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
        for process in list(self._processes):
            process.stop(signum)

    def _say(self, claim: Claim, text: str) -> None:
        values = json.dumps(claim.values, default=str)
        print(f"dlo sweep: trial {claim.number} {values}: {text}", file=sys.stderr, flush=True)


def environment_of_job(index: int, jobs: int) -> dict[str, str]:
    """Returns the variables by which trials of several workers of a machine share its cores and GPUs.

    Args:
        index: Index of the worker.
        jobs: Number of workers.
    """
    found: dict[str, str] = {}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs if _HAS_AFFINITY else 1))
    gpus = visible_gpus()
    if jobs > 1 and gpus:
        mine = gpus[index * len(gpus) // jobs : (index + 1) * len(gpus) // jobs]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(mine or [gpus[index * len(gpus) // jobs]])
    return found


_HAS_AFFINITY = hasattr(os, "sched_getaffinity")


def visible_gpus() -> list[str]:
    """Returns the NVIDIA GPUs that this process may use, by index or identifier, without torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return done.stdout.split() if done.returncode == 0 else []
