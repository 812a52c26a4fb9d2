"""Samplers and pruners of a sweep: Optuna's, by name.

Random search: Bergstra and Bengio 2012. TPE: Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization". GP:
Optuna's Gaussian process with log expected improvement. CMA-ES: Hansen 2016, arXiv 1604.00772. Asynchronous successive
halving: Li et al. 2018, "A System for Massively Parallel Hyperparameter Tuning" (ASHA), arXiv 1810.05934. Hyperband: Li
et al. 2016, arXiv 1603.06560. BOHB: Falkner et al. 2018, arXiv 1807.01774.

Departures: Optuna's ASHA decides at a rung when a trial reaches it, and stops the trial or lets it go on, where the
paper pauses and resumes. BOHB is Hyperband with a TPE a bracket, not the paper's density of the largest budget.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import warnings
from typing import Any

from dlo_framework.errors import DloError, did_you_mean

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
