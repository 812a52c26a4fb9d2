"""Engine of a sweep on Ray: Ray Tune places trials on a cluster, and its schedulers stop, or copy and change them.

ASHA: Li et al. 2018, arXiv 1810.05934. Population-based training (PBT): Jaderberg et al. 2017, arXiv 1711.09846: one
of the worst quarter of trials continues from the checkpoint of one of the best, with changed values.

A trial is the same process of ``dlo fit`` as without Ray, started by an actor of Ray. Its values and results go through
the sweep's own queue, in the process of the command: reports and resumption are those of the other engine. Checkpoints
that PBT copies are dlo's own, so that a trial may train under any strategy.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna

from dlo_framework.callback import PluginCallback
from dlo_framework.errors import DloError
from dlo_plugins.sweep.search_space import SearchSpace, SweepSettings
from dlo_plugins.sweep.trial_process import TrialProcess, last_error, trial_environment
from dlo_plugins.sweep.trial_queue import Claim, TrialQueue, finished_run, trial_config, trial_words

#: Checkpoint of a member's last report, and in it the values with which it trained.
REPORTED, VALUES = "reported.ckpt", "sweep_values.json"
#: Number of validations that no trial reaches.
_NEVER = 10**9


def run_on_ray(folder: Path, settings: SweepSettings, options: argparse.Namespace) -> int:
    """Runs a sweep's remaining trials on a Ray cluster: that of ``RAY_ADDRESS``, or one on this machine.

    Args:
        folder: Folder of the sweep, on a file system that all nodes share.
        settings: Settings of the sweep.
        options: Options of the command.

    Raises:
        DloError: The space has parts that PBT cannot change.
    """
    import ray
    from ray import tune

    mutations = make_mutations(SearchSpace(settings.space)) if settings.pruner == "pbt" else {}
    queue = TrialQueue(folder.resolve(), dataclasses.replace(settings, pruner="none"), create=True)
    left = queue.unfinished()
    print(f"dlo sweep: {left} of {settings.trials} trials left in {folder}, on Ray", file=sys.stderr, flush=True)
    if not left:
        return 0
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    try:
        trainable = tune.with_resources(
            _make_trainable(queue.folder, settings), {"cpu": options.trial_cpus, "gpu": options.trial_gpus}
        )
        results = QueueResults(queue)
        if settings.pruner == "pbt":
            claims = {claim.number: claim for claim in iter(queue.claim, None)}
            results.claims |= claims
            first = functools.partial(_initial_values, {number: one.values for number, one in claims.items()})
            space = {"number": tune.grid_search(sorted(claims)), "values": tune.sample_from(first)}
            search, samples = None, 1
        else:
            space, search, samples = {}, make_searcher(results), left
        config = tune.TuneConfig(
            metric=settings.metric,
            mode=settings.direction[:3],
            scheduler=make_scheduler(settings, mutations),
            search_alg=search,
            num_samples=samples,
            max_concurrent_trials=None if settings.pruner == "pbt" else options.jobs,
            trial_name_creator=name_trial,
        )
        run = tune.RunConfig(
            name=f"ray-{os.getpid()}",
            storage_path=str(queue.folder / "ray"),
            verbose=0,
            callbacks=[make_callback(results)],
        )
        tune.Tuner(trainable, param_space=space, tune_config=config, run_config=run).fit()
    finally:
        ray.shutdown()
    return 1 if results.failed and not results.completed else 0


def _initial_values(values: dict[int, dict[str, Any]], spec: Any) -> dict[str, Any]:
    """Returns a member's first values, by its number in Tune's config."""
    return values[spec["config"]["number"] if isinstance(spec, dict) else spec.config.number]


def name_trial(trial: Any) -> str:
    """Returns the name of Tune's trial when it is made: its number in the sweep.

    PBT later gives the trial the full config of the one that it copies, with that one's number.
    """
    return f"{trial.config['number']:04d}"


def trial_number(trial: Any) -> int:
    """Returns the number of Tune's trial in the sweep; see :func:`name_trial`."""
    return int(str(trial))


class QueueResults:
    """Results that Tune reports, recorded in the sweep's queue.

    Args:
        queue: Queue of the sweep.
    """

    def __init__(self, queue: TrialQueue) -> None:
        self.queue = queue
        self.claims: dict[int, Claim] = {}
        self.completed = self.failed = 0

    def __getstate__(self) -> dict[str, Any]:
        """Returns nothing: Tune pickles its parts to restore a run, and a sweep is restored from its queue."""
        return {}

    def claim(self) -> Claim | None:
        """Claims the next trial."""
        claim = self.queue.claim()
        if claim is not None:
            self.claims[claim.number] = claim
        return claim

    def report(self, number: int, result: dict[str, Any]) -> None:
        """Records a validation."""
        self.queue.report(number, int(result["validation"]), float(result[self.queue.settings.metric]))

    def end(self, number: int, *, failed: bool) -> None:
        """Records the end of a trial: completed if its run has finished, pruned if Tune has stopped it."""
        claim = self.claims.pop(number, None)
        if claim is None:
            return
        run = finished_run(claim.folder)
        if failed:
            self.failed += 1
            self.queue.fail(number, last_error(claim.folder))
        elif run is not None:
            self.completed += 1
            last = claim.folder / REPORTED / VALUES  # Only of a population's members.
            self.queue.finish(number, run, json.loads(last.read_text()) if last.exists() else None)
        else:
            self.queue.prune(number)
        self.queue.release(number)


def make_searcher(results: QueueResults) -> Any:
    """Returns a search algorithm of Tune's that takes its trials from the sweep's queue."""
    from ray.tune.search import Searcher

    class QueueSearcher(Searcher):
        """Search algorithm whose trials are the sweep's."""

        def suggest(self, trial_id: str) -> Any:
            """Returns the config of the next trial."""
            claim = results.claim()
            return {"number": claim.number, "values": claim.values} if claim is not None else Searcher.FINISHED

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            """Does nothing: the callback records ends, with the number of the trial."""

        def save(self, checkpoint_path: str) -> None:
            """Does nothing: the queue is in the storage."""

        def restore(self, checkpoint_path: str) -> None:
            """Does nothing: the queue is in the storage."""

    return QueueSearcher(metric=results.queue.settings.metric, mode=results.queue.settings.direction[:3])


def make_callback(results: QueueResults) -> Any:
    """Returns a callback of Tune's that records results in the sweep's queue."""

    class QueueCallback(PluginCallback):
        """Callback that records the results of trials."""

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
            results.report(trial_number(trial), result)

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            results.end(trial_number(trial), failed=False)

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            results.end(trial_number(trial), failed=True)

    return QueueCallback()


def make_scheduler(settings: SweepSettings, mutations: dict[str, Any]) -> Any:
    """Returns a scheduler of Tune's; its time is the number of validations.

    Args:
        settings: Settings of the sweep.
        mutations: Values that PBT draws from, by key.
    """
    from ray.tune import schedulers

    if settings.pruner == "asha":
        # One more than there are: a trial that has reached its last validation ends by itself.
        most = (settings.validations or _NEVER) + 1
        return schedulers.ASHAScheduler(
            time_attr="validation", max_t=most, grace_period=settings.first, reduction_factor=settings.factor
        )
    if settings.pruner == "median":
        return schedulers.MedianStoppingRule(
            time_attr="validation", grace_period=settings.first, min_samples_required=4
        )
    if settings.pruner == "pbt":
        return schedulers.PopulationBasedTraining(
            time_attr="validation",
            perturbation_interval=settings.first,
            hyperparam_mutations={"values": mutations},
            quantile_fraction=0.25,
        )
    return schedulers.FIFOScheduler()


def make_mutations(space: SearchSpace) -> dict[str, Any]:
    """Returns what PBT draws a key's new values from: a list of choices, or a function.

    Raises:
        DloError: A key has a condition: PBT changes keys one by one.
    """
    for one in space.dimensions:
        if one.when:
            raise DloError(
                f"sweep: {one.key} must have no condition with --pruner pbt, got when; remove it, or use asha"
            )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    return {
        one.key: (lambda one=one: one.suggest(study.ask())) if one.is_range else list(one.choices)
        for one in space.dimensions
        if one.kind != "value"
    }


def bounded(space: SearchSpace, values: dict[str, Any]) -> dict[str, Any]:
    """Returns values inside the space's ranges: PBT multiplies by 0.8 or 1.2, also beyond them."""
    clamped = dict(values)
    for one in space.dimensions:
        if one.is_range and one.key in clamped:
            value = min(max(clamped[one.key], one.choices[0]), one.choices[1])
            clamped[one.key] = round(value) if one.kind in ("int", "log_int") else float(value)
    return clamped


def _make_trainable(folder: Path, settings: SweepSettings) -> Callable[[dict[str, Any]], None]:
    """Returns the function that an actor of Ray runs: one trial, or its continuation after PBT has changed it."""

    def run_trial(config: dict[str, Any]) -> None:
        from ray import tune

        run_in_actor(folder, settings, int(tune.get_context().get_trial_name()), dict(config["values"]))

    return run_trial


def run_in_actor(folder: Path, settings: SweepSettings, number: int, values: dict[str, Any]) -> None:
    """Runs a trial's process, and reports its validations to Tune.

    Args:
        folder: Folder of the sweep.
        settings: Settings of the sweep.
        number: Number of the trial.
        values: Values of the space's keys.

    Raises:
        RuntimeError: The process has failed.
    """
    from ray import tune

    place = folder / "trials" / f"{number:04d}"
    config = trial_config(settings, number, bounded(SearchSpace(settings.space), values))
    callback = config["trainer"]["callbacks"][-1]["init_args"]
    values, begun = callback["values"], tune.get_checkpoint()
    checkpoint = "auto"
    if settings.pruner == "pbt":
        callback["checkpoint"] = str(place / REPORTED)
        if begun is not None:
            checkpoint = begun.path
            callback["restarts_optimizer"] = (Path(begun.path) / VALUES).read_text() != json.dumps(values)

    def answer(report: dict[str, Any]) -> dict[str, Any]:
        result = {settings.metric: report["value"], "validation": report["step"], "samples": report["samples"]}
        if settings.pruner == "pbt":
            (place / REPORTED / VALUES).write_text(json.dumps(values))
            tune.report(result, checkpoint=tune.Checkpoint.from_directory(str(place / REPORTED)))
        else:
            tune.report(result)
        return {"stop": False}

    process = TrialProcess(trial_words(settings, place, config, checkpoint), place, trial_environment({}))
    try:
        code = process.wait(answer)
    finally:
        if process.process.poll() is None:
            process.stop()
            process.process.wait()
    if code:
        raise RuntimeError(last_error(place))
