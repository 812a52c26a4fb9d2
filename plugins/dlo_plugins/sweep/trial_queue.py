"""Queue of a sweep's trials in an Optuna storage: each is run once, and none is lost, whichever process dies when.

All trials are created at the start, waiting and without values. A worker claims one under the folder's lock, which the
kernel releases if the worker dies, and takes the lock of the trial's folder before it releases that one. So a trial
that runs in the storage and whose folder nobody holds belongs to a dead worker: the next worker continues it, with the
values that it has, from the last checkpoint of its run. Values of a trial depend on the sweep's seed, the trial's
number and the results of others, not on the worker.

Optuna 5.0's own means do not serve here: heartbeats exist for databases alone, and its callback for trials of dead
processes enqueues another trial, with another number and folder; ``Study.optimize`` records Ctrl-C as a failure.

:class:`SweepWorkers` claim trials, run one after the other as ``dlo fit`` in a process of its own, and record the
results. They are threads of ``dlo sweep``, which imports Optuna and not torch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import optuna
import yaml
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from dlo_framework.atomic_file import write_atomic
from dlo_framework.errors import DloError
from dlo_framework.lock import ProcessLock, RunLock, is_held
from dlo_framework.run import runs
from dlo_plugins.sweep.search_space import (
    TRIALS,
    SearchSpace,
    SweepSettings,
    apply_values,
    best_value,
    make_pruner,
    make_sampler,
    trial_seed,
)
from dlo_plugins.sweep.trial_process import CONFIG, TrialProcess, last_error, trial_environment

JOURNAL = "journal.log"
#: Times that a trial may be started without progress, before it has failed.
STARTS = 3
#: Attributes of a trial in the storage.
PRUNED, STARTED, RUN, ERROR, ENDED_WITH = "pruned_at", "starts", "run", "error", "ended_with"
_FOLDER = "folder"


class JournalLock(ProcessLock):
    """Lock of Optuna's journal, which removes an incomplete last line: its writer has died before it returned.

    Optuna's own locks stay when their process is killed, for 30 seconds; and after a line that was cut off, its journal
    cannot be read any more.

    Args:
        path: File of the journal; ``path.lock`` beside it is its lock.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.with_name(f"{path.name}.lock"))
        self._journal = path

    def acquire(self) -> None:
        """Waits for the lock and takes it."""
        super().acquire()
        with open(self._journal, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if end and file.read(1) != b"\n":
                file.seek(0)
                file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def open_storage(folder: Path, url: str) -> Any:
    """Returns an Optuna storage.

    Args:
        folder: Folder of the sweep.
        url: URL of the storage: ``sqlite:///study.db``, another database, ``journal:///path``, or empty for the journal
            in the folder.

    Raises:
        DloError: The storage cannot be opened.
    """
    if not url or url.startswith("journal:///"):
        path = Path(url.removeprefix("journal://")) if url else folder / JOURNAL
        if not path.parent.is_dir():
            raise DloError(f"sweep: --storage must be in a folder that exists, got {url}; create {path.parent}")
        lock: Any = JournalLock(path)  # The base class of such locks is not public.
        return optuna.storages.JournalStorage(JournalFileBackend(str(path), lock))
    from sqlalchemy.exc import SQLAlchemyError

    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite:") else {"pool_pre_ping": True}
    try:
        return optuna.storages.RDBStorage(url, engine_kwargs=options)
    except (SQLAlchemyError, ImportError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise DloError(
            f"sweep: --storage must be a database that opens, such as sqlite:///sweep.db, got {url}: {why}"
        ) from None


def finished_run(folder: Path) -> Path | None:
    """Returns the newest run of a trial if its summary says that it has finished; else None."""
    for run in runs.versions(folder)[:1]:
        try:
            summary = json.loads((run / runs.SUMMARY).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return run if summary["status"] == "finished" else None
    return None


@dataclass(frozen=True)
class Claim:
    """Trial that this process runs.

    Attributes:
        number: Number of the trial.
        values: Values of the space's keys.
        folder: Folder of the trial.
        is_continued: Whether another process, or an earlier start, began it.
    """

    number: int
    values: dict[str, Any]
    folder: Path
    is_continued: bool


class TrialQueue:
    """Trials of a sweep, shared by all processes that open its storage.

    Args:
        folder: Folder of the sweep, shared by all processes.
        settings: Settings of the sweep.
        create: Whether to create the study and the missing trials.

    Raises:
        DloError: The storage cannot be opened, or has a study of that name for another folder.
    """

    def __init__(self, folder: Path, settings: SweepSettings, *, create: bool = False) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.settings, self.space = folder, settings, SearchSpace(settings.space)
        self.lock = ProcessLock(folder / "claim.lock")
        self.storage = optuna.storages.get_storage(open_storage(folder, settings.storage))
        self._locks: dict[int, RunLock] = {}
        if create:
            with self.lock.held():
                self.study = self._create()
        else:
            self.study = optuna.load_study(study_name=self.folder.name, storage=self.storage)
        self._study_id = self.storage.get_study_id_from_name(self.folder.name)

    def _create(self) -> optuna.Study:
        """Creates the study and the trials that it lacks; a start that was killed meanwhile is completed."""
        study = optuna.create_study(
            storage=self.storage,
            study_name=self.folder.name,
            direction=optuna.study.StudyDirection[self.settings.direction.upper()],
            load_if_exists=True,
        )
        place = study.user_attrs.get(_FOLDER)
        own = str(self.folder.resolve())
        if place is None:
            study.set_user_attr(_FOLDER, own)
        elif place != own and Path(place).exists():
            raise DloError(
                f"sweep: the storage must have no sweep '{self.folder.name}' of another folder, got that of {place};"
                " choose another --folder or --storage"
            )
        points: list[dict[str, Any]] = [{}] * self.settings.trials
        if self.settings.sampler == "grid":
            points = [self.space.as_params(point) for point in self.space.grid()]
        for point in points[len(study.get_trials(deepcopy=False)) :]:
            study.enqueue_trial(point)
        return study

    # --- claims ----------------------------------------------------------------------------------------------

    def claim(self) -> Claim | None:
        """Returns a trial for this process to run: one of a dead process, or one that waits; None if there is none.

        A trial of a dead process that was already pruned, or has been started often without progress, is finished here.
        """
        while True:
            with self.lock.held():
                next_trial = self._claim_one()
            if next_trial is None:
                return None
            trial, is_continued = next_trial
            if is_continued and self._finish_orphan(trial):
                self.release(trial.number)
                continue
            values = self.space.suggest(optuna.Trial(self._sampled_study(trial.number), self._id(trial.number)))
            return Claim(trial.number, values, self.trial_folder(trial.number), is_continued)

    def _claim_one(self) -> tuple[FrozenTrial, bool] | None:
        """Locks the folder of a trial that no live process runs; returns it, and whether one has run it before."""
        trials = self._trials(TrialState.RUNNING, TrialState.WAITING)
        for trial in sorted(trials, key=lambda one: one.state == TrialState.WAITING):
            folder, state = self.trial_folder(trial.number), trial.state
            if trial.number in self._locks or is_held(folder):
                continue
            if any(is_held(run) for run in runs.versions(folder)[:1]):
                continue  # Its worker has died, and its run is being ended.
            self._lock(trial.number)
            if self._trial(trial.number).state == state:  # Else it has ended since it was read.
                if state == TrialState.WAITING:
                    self.storage.set_trial_state_values(self._id(trial.number), TrialState.RUNNING)
                return trial, state == TrialState.RUNNING
            self.release(trial.number)
        return None

    def _sampled_study(self, number: int) -> optuna.Study:
        """Returns the study with the pruner, and with the sampler of a trial."""
        own = self.settings
        return optuna.load_study(
            study_name=self.folder.name,
            storage=self.storage,
            sampler=make_sampler(own.sampler, trial_seed(own.seed, number), own.pruner != "none"),
            pruner=make_pruner(own.pruner, own.first, own.factor, own.validations),
        )

    def _finish_orphan(self, trial: FrozenTrial) -> bool:
        """Finishes a dead process's trial that needs no further run; returns whether it did."""
        if PRUNED in trial.user_attrs:
            self.finish(trial.number)
            return True
        run = finished_run(self.trial_folder(trial.number))
        if run is not None:
            self.finish(trial.number, run)
            return True
        starts = trial.user_attrs.get(STARTED, [])
        progress = self._progress(trial)
        if len(starts) >= STARTS and all(start == progress for start in starts[-STARTS:]):
            self.fail(trial.number, f"its process died {STARTS} times without progress; see trial.log")
            return True
        return False

    def note_start(self, number: int) -> None:
        """Records that a trial's run starts, with its progress so far."""
        trial = self._trial(number)
        starts = [*trial.user_attrs.get(STARTED, []), self._progress(trial)]
        self.storage.set_trial_user_attr(self._id(number), STARTED, starts)

    def _progress(self, trial: FrozenTrial) -> list[int]:
        """Returns the number of validations, and the time of the newest checkpoint's folder."""
        newest = 0
        for run in runs.versions(self.trial_folder(trial.number))[:1]:
            for path in (run / runs.CHECKPOINTS).glob("*.ckpt"):
                newest = max(newest, path.stat().st_mtime_ns)
        return [len(trial.intermediate_values), newest]

    # --- results ---------------------------------------------------------------------------------------------

    def report(self, number: int, step: int, value: float) -> bool:
        """Records the value of a trial's validation; returns whether to stop the trial.

        A trial that repeats a validation after a resume keeps its first value.

        Args:
            number: Number of the trial.
            step: Number of the validation, from 1.
            value: Value of the metric.
        """
        trial = self._trial(number)
        if step not in trial.intermediate_values:
            self.storage.set_trial_intermediate_value(self._id(number), step, value)
            trial = self._trial(number)
        last = max(trial.intermediate_values)
        if step < last:
            return False  # Its next validations are known, and it was not pruned at them.
        study = self._sampled_study(number) if self.settings.pruner != "none" else None
        stop = study is not None and bool(study.pruner.prune(study, trial))
        if stop:
            self.storage.set_trial_user_attr(self._id(number), PRUNED, step)
        return stop

    def finish(self, number: int, run: Path | None = None, ended_with: Mapping[str, Any] | None = None) -> str:
        """Finishes a trial whose run has ended, with the best of its values; returns its state.

        Args:
            number: Number of the trial.
            run: Folder of its run.
            ended_with: Values of the space's keys at its end, where they have changed since it was claimed.
        """
        trial = self._trial(number)
        value = best_value(trial.intermediate_values.values(), self.settings.direction)
        if run is not None:
            self.storage.set_trial_user_attr(self._id(number), RUN, str(run.relative_to(self.folder)))
        if ended_with is not None:
            self.storage.set_trial_user_attr(self._id(number), ENDED_WITH, dict(ended_with))
        if PRUNED in trial.user_attrs:
            self._tell(number, TrialState.PRUNED)
            return "PRUNED"
        if value is None or not math.isfinite(value):
            why = "no validation" if not trial.intermediate_values else "no finite value"
            self.fail(number, f"{why} of {self.settings.metric} was logged")
            return "FAIL"
        self._tell(number, TrialState.COMPLETE, value)
        return "COMPLETE"

    def prune(self, number: int) -> None:
        """Finishes a trial that another scheduler has stopped."""
        self.storage.set_trial_user_attr(
            self._id(number), PRUNED, max(self._trial(number).intermediate_values, default=0)
        )
        self._tell(number, TrialState.PRUNED)

    def fail(self, number: int, why: str) -> None:
        """Finishes a trial that has failed."""
        self.storage.set_trial_user_attr(self._id(number), ERROR, why)
        self._tell(number, TrialState.FAIL)

    def _tell(self, number: int, state: TrialState, value: float | None = None) -> None:
        self._sampled_study(number).tell(number, value, state=state)

    def release(self, number: int) -> None:
        """Releases a trial's folder, after its end, or for another process to continue it."""
        lock = self._locks.pop(number, None)
        if lock is not None:
            lock.release()

    def unfinished(self) -> int:
        """Returns the number of trials that wait or run."""
        return len(self._trials(TrialState.RUNNING, TrialState.WAITING))

    def describe(self, number: int) -> str:
        """Returns a trial's result as text: its error, or its value and the number of validations."""
        trial = self._trial(number)
        if trial.state == TrialState.FAIL:
            return f": {trial.user_attrs.get(ERROR, '')}"
        value = best_value(trial.intermediate_values.values(), self.settings.direction)
        return f": {self.settings.metric} {value:.5g} in {len(trial.intermediate_values)} validations"

    def failed_from_the_start(self, number: int = 3) -> str | None:
        """Returns the error of the last failed trial if this many have failed and no other has ended; else None."""
        ended = self._trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        if len(ended) < number or any(trial.state != TrialState.FAIL for trial in ended):
            return None
        return str(ended[-1].user_attrs.get(ERROR, ""))

    # --- the storage -----------------------------------------------------------------------------------------

    def trial_folder(self, number: int) -> Path:
        """Returns the folder of a trial, which holds its config, its log and its run."""
        return self.folder / TRIALS / f"{number:04d}"

    def _lock(self, number: int) -> None:
        folder = self.trial_folder(number)
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder.resolve())
        lock.acquire()
        self._locks[number] = lock

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.storage.get_all_trials(self._study_id, deepcopy=False, states=states)

    def _trial(self, number: int) -> FrozenTrial:
        return self.storage.get_trial(self._id(number))

    def _id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self._study_id, number)


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
    variables: dict[str, str] = {}
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // jobs if _HAS_AFFINITY else 1))
    gpus = visible_gpus()
    if jobs > 1 and gpus:
        mine = gpus[index * len(gpus) // jobs : (index + 1) * len(gpus) // jobs]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(mine or [gpus[index * len(gpus) // jobs]])
    return variables


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
