"""Worker of a sweep: claims trials, runs each as ``dlo fit`` in a process of its own, and records the results.

``python -m dlo_plugins.sweep.sweep_worker FOLDER`` is one worker; ``dlo sweep --jobs N`` starts several. It imports
Optuna and not torch.
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
from pathlib import Path
from types import FrameType
from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.sweep.search_space import apply_values
from dlo_plugins.sweep.sweep_settings import TRIALS, SweepSettings, read_settings
from dlo_plugins.sweep.trial_process import TrialProcess, last_error, trial_environment, write_trial_config
from dlo_plugins.sweep.trial_queue import Claim, TrialQueue, finished_run

#: Seconds between looks at the trials of other workers, when none is left to start.
_WAIT = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
#: Callback that the config of each trial gets.
CALLBACK = "SweepTrial"
#: File of a trial with a line for each validation: value, step, samples, seconds.
REPORTS = "reports.jsonl"
#: Function that runs a trial: it gets the claim, and a function that answers a report, and returns the exit code.
Runner = Callable[[Claim, Callable[[dict[str, Any]], dict[str, Any]]], int]


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


class SweepWorker:
    """Worker of a sweep.

    Args:
        queue: Trials of the sweep.
        waits: Whether to wait for the trials of other workers, and continue those of dead ones, before it ends.
        runner: Function that runs a trial; None for a process of ``dlo fit``.
        environment: Further environment variables of the trials.
    """

    def __init__(
        self,
        queue: TrialQueue,
        *,
        waits: bool = True,
        runner: Runner | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.queue, self._waits = queue, waits
        self._run = runner or self._run_process
        self._environment = environment or {}
        self._process: TrialProcess | None = None
        self._signum = 0

    def run(self) -> int:
        """Runs trials until none is left; returns the exit code: 0, or 128 + a signal.

        Raises:
            DloError: The first three trials have failed, or a key of the space leads nowhere in the config.
        """
        previous = {signum: signal.signal(signum, self._on_signal) for signum in _SIGNALS}
        try:
            return self._loop()
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _loop(self) -> int:
        while not self._signum:
            failure = self.queue.failed_from_the_start()
            if failure is not None:
                raise DloError(
                    f"sweep: the first three trials have failed: {failure}; see {self.queue.folder / TRIALS}, and"
                    " change the config or the space in another --folder"
                )
            claim = self.queue.claim()
            if claim is not None:
                self._run_claim(claim)
            elif not self._waits or not self.queue.unfinished():
                return 0
            else:
                time.sleep(_WAIT)
        return 128 + (signal.SIGINT if self._signum == signal.SIGINT else signal.SIGTERM)

    def _run_claim(self, claim: Claim) -> None:
        """Runs a claimed trial and records its end; one that was asked to stop is left for another process."""
        queue, began = self.queue, time.monotonic()
        try:
            queue.note_start(claim.number)
            code = self._run(claim, functools.partial(self._answer, claim))
            if self._signum:
                return
            if code == 0:
                state = queue.finish(claim.number, finished_run(claim.folder))
            elif code < 0 or code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
                self._say(
                    claim, f"its process was ended by signal {-code if code < 0 else code - 128}; it is continued"
                )
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

    def _run_process(self, claim: Claim, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
        """Runs a trial as ``dlo fit``, from the last checkpoint of its run if it has one."""
        settings = self.queue.settings
        config = write_trial_config(claim.folder, trial_config(settings, claim.number, claim.values))
        words = ["fit", "--config", str(config), *settings.words, "--run.dir", str(claim.folder.parent)]
        words += ["--run.name", claim.folder.name, "--ckpt_path", "auto"]
        self._process = TrialProcess(words, claim.folder, trial_environment(self._environment))
        if self._signum:
            self._process.stop()
        try:
            return self._process.wait(answer)
        finally:
            self._process = None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
        process = self._process
        if process is not None:
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


def main(argv: list[str]) -> int:
    """Runs one worker of the sweep in a folder."""
    folder = Path(argv[0])
    settings = read_settings(folder)
    if settings is None:
        raise DloError(f"sweep: the folder must hold a sweep, got {folder}; start it with dlo sweep")
    waits = "--no-wait" not in argv[1:]
    return SweepWorker(
        TrialQueue(folder, settings), waits=waits, environment=json.loads(os.environ.get(MORE, "{}"))
    ).run()


#: Variable with further environment variables of the trials, as JSON.
MORE = "DLO_SWEEP_ENVIRONMENT"

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DloError as error:
        print(f"dlo sweep: {error}", file=sys.stderr)
        sys.exit(2)
