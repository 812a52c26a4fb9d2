"""Settings of a sweep, in ``sweep.json`` of its folder, and the samplers and pruners that they name: Optuna's.

Random search: Bergstra and Bengio 2012. TPE: Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization". GP:
Optuna's Gaussian process with log expected improvement. CMA-ES: Hansen 2016, arXiv 1604.00772. Asynchronous successive
halving: Li et al. 2018, "A System for Massively Parallel Hyperparameter Tuning" (ASHA), arXiv 1810.05934. Hyperband: Li
et al. 2016, arXiv 1603.06560. BOHB: Falkner et al. 2018, arXiv 1807.01774.

Departures: Optuna's ASHA decides at a rung when a trial reaches it, and stops the trial or lets it go on, where the
paper pauses and resumes. BOHB is Hyperband with a TPE a bracket, not the paper's density of the largest budget.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dlo_framework.atomic_file import write_atomic
from dlo_framework.errors import DloError, did_you_mean

FILE = "sweep.json"
TRIALS = "trials"
#: Settings that are kept as YAML.
_YAML = ("config", "space")
#: Settings that a later start of the same sweep may change.
_FREE = ("trials",)


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep.

    Attributes:
        config: Config that trials start from.
        words: Further options of ``dlo fit`` for all trials.
        space: Content of the space file.
        metric: Metric of the validation.
        direction: Direction of the metric: ``minimize`` or ``maximize``.
        trials: Number of trials.
        sampler: Name of the sampler.
        pruner: Name of the pruner.
        seed: Seed of the sampler; the trials' own seed is the config's.
        first: Number of validations before a trial can be pruned.
        factor: Reduction factor of the pruner.
        validations: Number of validations of a full trial; None if it is not known.
        storage: URL of the storage; empty for the journal in the folder.
    """

    config: dict[str, Any]
    space: dict[str, Any]
    metric: str
    direction: str
    trials: int
    words: list[str] = field(default_factory=list)
    sampler: str = "tpe"
    pruner: str = "none"
    seed: int = 0
    first: int = 1
    factor: int = 3
    validations: int | None = None
    storage: str = ""

    def write(self, folder: Path) -> None:
        """Writes the settings into a sweep's folder."""
        content = dataclasses.asdict(self)
        for name in _YAML:  # JSON would turn a key such as 0 into text.
            content[name] = yaml.safe_dump(content[name], sort_keys=False)
        write_atomic(folder / FILE, json.dumps(content, indent=1) + "\n")

    def check_same(self, folder: Path, own: SweepSettings) -> None:
        """Checks that a command's settings are those of the sweep in the folder.

        Args:
            folder: Folder of the sweep.
            own: Settings of the command.

        Raises:
            DloError: They differ in more than the number of trials.
        """
        for one in dataclasses.fields(self):
            before, now = getattr(self, one.name), getattr(own, one.name)
            if one.name not in _FREE and before != now:
                raise DloError(
                    f"sweep: {_OPTIONS.get(one.name, one.name)} must be that of the sweep in {folder}, got"
                    f" {_short(now)} after {_short(before)}; choose another --folder"
                )
        if own.trials < self.trials:
            raise DloError(
                f"sweep: --trials must be at least the {self.trials} of the sweep in {folder}, got {own.trials};"
                " raise it, or choose another --folder"
            )


_OPTIONS = {"config": "the config", "words": "the options of dlo fit", "space": "--space", "first": "--first"}


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 80 else f"{text[:77]}..."


def read_settings(folder: Path) -> SweepSettings | None:
    """Returns the settings of the sweep in a folder; None if it has none.

    Raises:
        DloError: The file cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return SweepSettings(**content | {name: yaml.safe_load(content[name]) for name in _YAML})
    except (OSError, TypeError, KeyError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise DloError(f"sweep: {path} must be the settings of a sweep, got {error}; choose another --folder") from None


# --- samplers and pruners ------------------------------------------------------------------------------------

SAMPLERS = ("tpe", "gp", "cmaes", "random", "grid")
PRUNERS = ("none", "median", "asha", "hyperband", "bohb")
#: Ray Tune's schedulers.
RAY_PRUNERS = ("none", "asha", "median", "pbt")


def check_methods(sampler: str, pruner: str, engine: str = "optuna") -> None:
    """Checks the names of a sampler and a pruner, and that they go together.

    Raises:
        DloError: They do not.
    """
    pruners, place = (RAY_PRUNERS, " with --engine ray") if engine == "ray" else (PRUNERS, "")
    for option, name, known in (("sampler", sampler, SAMPLERS), ("pruner", pruner, pruners)):
        if name not in known:
            near = did_you_mean(name, known) or ";"
            raise DloError(
                f"sweep: --{option} must be one of {', '.join(known)}{place}, got {name}{near} choose one of them"
            )
    if pruner == "bohb" and sampler != "tpe":
        raise DloError(f"sweep: --sampler must be tpe with --pruner bohb, got {sampler}; use --pruner hyperband")
    if pruner == "pbt" and sampler != "random":
        raise DloError(f"sweep: --sampler must be random with --pruner pbt, got {sampler}; add --sampler random")


def check_installed(sampler: str = "tpe", engine: str = "optuna") -> None:
    """Checks that Optuna is installed, and the packages of the sampler and of the engine.

    Args:
        sampler: Name, of ``SAMPLERS``.
        engine: ``optuna`` or ``ray``.

    Raises:
        DloError: One is missing.
    """
    for name in ("optuna", *(["cmaes"] if sampler == "cmaes" else [])):
        if importlib.util.find_spec(name) is None:
            raise DloError(f"dlo sweep needs {name}, which is not installed; pip install 'dlo_framework[hpo]'")
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise DloError("sweep: --engine ray needs Ray, which is not installed; pip install 'dlo_framework[ray]'")


def trial_seed(seed: int, number: int) -> int:
    """Returns the sampler's seed for a trial: other trials have other seeds, whichever worker samples them."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big")


def make_sampler(name: str, seed: int, pruned: bool = False) -> Any:
    """Returns an Optuna sampler for one trial; what it knows of other trials is in the storage.

    Args:
        name: Name, of ``SAMPLERS``.
        seed: Seed of the trial.
        pruned: Whether trials may be pruned, and CMA-ES then learns from them too.
    """
    import optuna

    samplers = optuna.samplers
    if name == "gp":
        return samplers.GPSampler(seed=seed, warn_independent_sampling=False)
    if name == "cmaes":
        independent = samplers.RandomSampler(seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of consider_pruned_trials
            return samplers.CmaEsSampler(
                seed=seed,
                warn_independent_sampling=False,
                independent_sampler=independent,
                consider_pruned_trials=pruned,
            )
    if name == "tpe":
        return samplers.TPESampler(seed=seed, constant_liar=True)
    return samplers.RandomSampler(seed=seed)  # A grid's trials have all their values from the start.


def make_pruner(name: str, first: int, factor: int, most: int | None) -> Any:
    """Returns an Optuna pruner; a resource is a validation.

    Args:
        name: Name, of ``PRUNERS``.
        first: Number of validations before a trial can be pruned.
        factor: Reduction factor; from each rung, one of this number of trials goes on.
        most: Number of validations of a full trial; None leaves it to Hyperband to find out.
    """
    import optuna

    pruners = optuna.pruners
    if name == "median":
        return pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=first - 1)
    if name == "asha":
        return pruners.SuccessiveHalvingPruner(min_resource=first, reduction_factor=factor)
    if name in ("hyperband", "bohb"):
        limit: Any = "auto" if most is None else max(most, first)
        return pruners.HyperbandPruner(min_resource=first, max_resource=limit, reduction_factor=factor)
    return pruners.NopPruner()


def best_value(values: Any, direction: str) -> float | None:
    """Returns the best of a trial's reported values, NaN left out; None if there is none."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return None
    return float(max(numbers) if direction == "maximize" else min(numbers))
