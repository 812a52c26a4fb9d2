"""What a sweep varies, which keys of a config over which values and under which conditions, and its settings.

The settings are in ``sweep.json`` of the sweep's folder. The samplers and pruners that they name are Optuna's.

Random search: Bergstra and Bengio 2012. TPE: Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization". GP:
Optuna's Gaussian process with log expected improvement. CMA-ES: Hansen 2016, arXiv 1604.00772. Asynchronous successive
halving: Li et al. 2018, "A System for Massively Parallel Hyperparameter Tuning" (ASHA), arXiv 1810.05934. Hyperband: Li
et al. 2016, arXiv 1603.06560. BOHB: Falkner et al. 2018, arXiv 1807.01774.

Departures: Optuna's ASHA decides at a rung when a trial reaches it, and stops the trial or lets it go on, where the
paper pauses and resumes. BOHB is Hyperband with a TPE a bracket, not the paper's density of the largest budget.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.util
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from dlo_framework.atomic_file import write_atomic
from dlo_framework.errors import DloError, did_you_mean

#: Kinds of dimensions, with an example of each.
KINDS = {
    "choice": "{choice: [a, b]}, or [a, b]",
    "uniform": "{uniform: [0.0, 0.5]}",
    "log": "{log: [1e-4, 1e-1]}",
    "int": "{int: [2, 12]}",
    "log_int": "{log_int: [16, 1024]}",
    "value": "{value: 0.1}",
}


@dataclass(frozen=True)
class Dimension:
    """Values of one key of the config.

    Attributes:
        key: Dotted key of the config.
        kind: Kind of the values, of ``KINDS``.
        choices: Values of a choice; the single one of ``value``; both ends of a range.
        distribution: Optuna's distribution; that of a choice has text in place of lists and mappings.
        when: Values of other keys with which this key is set; it is left out with others.
    """

    key: str
    kind: str
    choices: tuple[Any, ...]
    distribution: Any
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def is_range(self) -> bool:
        """Whether the values are numbers between two ends."""
        return self.kind not in ("choice", "value")

    def is_set(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the key is set beside these values of other keys."""
        return all(name in values and _is_in(values[name], allowed) for name, allowed in self.when.items())

    def suggest(self, trial: Any) -> Any:
        """Returns the value that an Optuna trial suggests."""
        own = self.distribution
        if not self.is_range:
            if self.kind == "choice":
                label = trial.suggest_categorical(self.key, own.choices)
                return copy.deepcopy(next(one for one in self.choices if _is_in(_label(one), (label,))))
            return copy.deepcopy(self.choices[0])
        suggest = trial.suggest_int if self.kind in ("int", "log_int") else trial.suggest_float
        return suggest(self.key, own.low, own.high, step=own.step, log=own.log)

    def grid(self) -> list[Any]:
        """Returns all values, for a grid.

        Raises:
            DloError: The range is continuous.
        """
        own = self.distribution
        if not self.is_range:
            return list(self.choices)
        if own.log or own.step is None:
            raise DloError(
                f"space: {self.key} must have a finite number of values under --sampler grid, got {self.kind}"
                f" [{own.low:g}, {own.high:g}]; list the values{', or set a step' if self.kind == 'uniform' else ''}"
            )
        return [own.low + index * own.step for index in range(round((own.high - own.low) / own.step) + 1)]

    def may_be(self, value: Any) -> bool:
        """Returns whether the key can have a value."""
        if not self.is_range:
            return _is_in(value, self.choices)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.choices[0] <= value <= self.choices[1]


class SearchSpace:
    """Search space of a sweep: dimensions in an order in which conditions follow the keys that they ask for.

    Args:
        content: Mapping from dotted keys of the config to their values: a list of choices, or a mapping with one of
            ``choice``, ``uniform``, ``log``, ``int``, ``log_int`` and ``value``, and with ``step`` and ``when``.

    Raises:
        DloError: The space is invalid; the message names the key, the rule and the fix.
    """

    def __init__(self, content: Any) -> None:
        if not isinstance(content, dict) or not content:
            raise DloError(
                f"space: the file must map config keys to values, such as model.init_args.lr: {KINDS['log']}, got"
                f" {_shown(content)}; write one line a key"
            )
        self.content = content
        dimensions = {str(key): parse_dimension(str(key), value) for key, value in content.items()}
        _check_prefixes(list(dimensions))
        self.dimensions = _in_order(dimensions)
        if all(one.kind == "value" for one in self.dimensions):
            raise DloError("space: a key must have more than one value, got single values alone; add a range or a list")

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Returns the values that an Optuna trial suggests, by key; keys whose condition is not met are left out."""
        values: dict[str, Any] = {}
        for one in self.dimensions:
            if one.is_set(values):
                values[one.key] = one.suggest(trial)
        return values

    def grid(self) -> list[dict[str, Any]]:
        """Returns all combinations of values, each once; keys whose condition is not met are left out."""
        points: list[dict[str, Any]] = [{}]
        for one in self.dimensions:
            points = [
                {**point, **({one.key: value})}
                for point in points
                for value in (one.grid() if one.is_set(point) else [_LEFT_OUT])
            ]
            points = [{key: value for key, value in point.items() if value is not _LEFT_OUT} for point in points]
        return points

    def as_params(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values as the storage keeps them: choices by their labels, single values left out."""
        set_here = [one for one in self.dimensions if one.key in values and one.kind != "value"]
        return {one.key: values[one.key] if one.is_range else _label(values[one.key]) for one in set_here}

    def probes(self) -> list[dict[str, Any]]:
        """Returns few combinations in which each choice, and both ends of each range, occur."""
        number = max(len(one.choices) for one in self.dimensions)
        probes = [self._probe(index, {}) for index in range(number)]
        for one in self.dimensions:
            if one.when:
                probes += [self._probe(index, _requirements(one, self)) for index in range(len(one.choices))]
        return [dict(items) for items in {json.dumps(probe, default=str): probe for probe in probes}.values()]

    def _probe(self, index: int, forced: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for one in self.dimensions:
            if one.is_set(values):
                values[one.key] = forced.get(one.key, one.choices[index % len(one.choices)])
        return values

    def conflicting(self, words: list[str]) -> Iterator[tuple[str, str]]:
        """Yields an option of ``dlo fit`` and the key of the space that it would override, or be overridden by."""
        for word in words:
            if not word.startswith("--"):
                continue
            name = word.removeprefix("--").partition("=")[0]
            for one in self.dimensions:
                if one.key == name or one.key.startswith(f"{name}.") or name.startswith(f"{one.key}."):
                    yield f"--{name}", one.key


_LEFT_OUT = object()


def parse_dimension(key: str, value: Any) -> Dimension:
    """Returns the dimension that a line of the space file describes.

    Raises:
        DloError: The line is invalid.
    """
    if isinstance(value, list):
        value = {"choice": value}
    if not isinstance(value, dict):
        raise DloError(f"space: {key} must be a list of choices or a mapping, got {_shown(value)}; such as [{value}]")
    kinds = [name for name in value if name in KINDS]
    unknown = [str(name) for name in value if name not in KINDS and name not in ("step", "when")]
    if unknown:
        raise DloError(
            f"space: {key} must have one of {', '.join(KINDS)}, and step and when, got '{unknown[0]}'"
            f"{did_you_mean(unknown[0], [*KINDS, 'step', 'when']) or '; such as ' + KINDS['log']}"
        )
    if len(kinds) != 1:
        raise DloError(f"space: {key} must have exactly one of {', '.join(KINDS)}, got {len(kinds)}; keep one")
    kind = kinds[0]
    when = _parse_when(key, value.get("when"))
    if "step" in value and kind not in ("uniform", "int"):
        raise DloError(f"space: {key}: step must be left out with {kind}, got {value['step']}; use uniform or int")
    if kind in ("value", "choice"):
        choices = (value[kind],) if kind == "value" else _parse_choices(key, value[kind])
        return Dimension(key, kind, choices, CategoricalDistribution([_label(one) for one in choices]), when)
    low, high = _parse_range(key, kind, value[kind])
    step = _parse_step(key, kind, value.get("step"), low, high)
    is_log = kind.startswith("log")
    if kind in ("int", "log_int"):
        own: Any = IntDistribution(int(low), int(high), log=is_log, step=int(step or 1))
    else:
        own = FloatDistribution(low, high, log=is_log, step=step)
    return Dimension(key, kind, (own.low, own.high), own, when)


def _parse_choices(key: str, choices: Any) -> tuple[Any, ...]:
    if not isinstance(choices, list) or len(choices) < 2:
        raise DloError(f"space: {key} must have at least two choices, got {_shown(choices)}; write [a, b], or value: a")
    labels = [json.dumps(one, default=str) for one in choices]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise DloError(f"space: {key} must have each choice once, got {twice} twice; remove one")
    return tuple(choices)


def _parse_range(key: str, kind: str, ends: Any) -> tuple[float, float]:
    if not isinstance(ends, list) or len(ends) != 2:
        raise DloError(f"space: {key} must have two ends, got {_shown(ends)}; such as {KINDS[kind]}")
    low, high = (_number(key, end) for end in ends)
    if not low < high:
        raise DloError(f"space: {key} must have a low end below its high end, got [{low:g}, {high:g}]; swap them")
    if kind in ("log", "log_int") and low <= 0:
        raise DloError(f"space: {key} must be above 0 on a log scale, got {low:g}; raise it, or use uniform")
    if kind in ("int", "log_int") and not (low.is_integer() and high.is_integer()):
        raise DloError(f"space: {key} must have whole numbers as ends, got [{low:g}, {high:g}]; use uniform or log")
    return low, high


def _parse_step(key: str, kind: str, step: Any, low: float, high: float) -> float | None:
    if step is None:
        return 1.0 if kind == "int" else None
    size = _number(key, step)
    if not 0 < size <= high - low or (kind == "int" and not size.is_integer()):
        rule = "a whole number of at least 1 and" if kind == "int" else "above 0 and"
        raise DloError(f"space: {key}: step must be {rule} at most {high - low:g}, got {size:g}; change it")
    return size


def _number(key: str, value: Any) -> float:
    """Returns a number; YAML 1.1 reads `1e-4` as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DloError(f"space: {key} must have finite numbers, got {value}; such as 1e-4")
    return number


def _parse_when(key: str, when: Any) -> dict[str, tuple[Any, ...]]:
    if when is None:
        return {}
    if not isinstance(when, dict) or not when:
        raise DloError(
            f"space: {key}: when must map keys of the space to values, got {_shown(when)}; such as when:"
            " {model.init_args.optimizer: sgd}"
        )
    return {str(name): tuple(value) if isinstance(value, list) else (value,) for name, value in when.items()}


def _check_prefixes(keys: list[str]) -> None:
    for one, other in itertools.permutations(keys, 2):
        if other.startswith(f"{one}."):
            raise DloError(
                f"space: keys must not contain each other, got {one} and {other}; put the mapping into the choices of"
                f" {one}, or vary its keys alone"
            )


def _in_order(dimensions: dict[str, Dimension]) -> list[Dimension]:
    """Returns dimensions so that each follows those of its condition, and otherwise in the file's order."""
    ordered: dict[str, Dimension] = {}
    for one in dimensions.values():
        for name, allowed in one.when.items():
            if name not in dimensions:
                raise DloError(
                    f"space: {one.key}: when must name keys of the space, got {name}"
                    f"{did_you_mean(name, dimensions) or '; add it to the space'}"
                )
            other = dimensions[name]
            wrong = next((value for value in allowed if not other.may_be(value)), None)
            if wrong is not None:
                raise DloError(
                    f"space: {one.key}: when must name values of {name}, got {wrong}; {name} has"
                    f" {', '.join(str(value) for value in other.choices)}"
                )
    waiting = list(dimensions.values())
    while waiting:
        ready = [one for one in waiting if all(name in ordered for name in one.when)]
        if not ready:
            raise DloError(f"space: conditions must not form a circle, got one through {waiting[0].key}; remove a when")
        ordered[ready[0].key] = ready[0]
        waiting.remove(ready[0])
    return list(ordered.values())


def _requirements(dimension: Dimension, space: SearchSpace) -> dict[str, Any]:
    """Returns values of other keys with which a key is set."""
    forced: dict[str, Any] = {}
    by_key = {one.key: one for one in space.dimensions}
    for name, allowed in dimension.when.items():
        forced |= {name: allowed[0], **_requirements(by_key[name], space)}
    return forced


def _label(value: Any) -> Any:
    """Returns a choice as a storage can keep it."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value, default=str)


def _is_in(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Returns whether a value is among others; True is not 1, and 1 is 1.0."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in allowed)


def _shown(value: Any) -> str:
    return "nothing" if value in (None, {}, []) else str(value)


# --- configs with values -----------------------------------------------------------------------------------------


def merge_configs(configs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns several configs as one, the later over the earlier, as ``dlo fit`` reads several ``--config``.

    Mappings are merged key by key, but one with another ``class_path`` replaces the earlier one. Lists are replaced;
    those of a key that ends with ``+`` are appended.
    """
    merged: dict[str, Any] = {}
    for config in configs:
        merged = _merge(merged, config)
    return merged


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in over.items():
        name = key.removesuffix("+") if isinstance(key, str) else key
        known = merged.get(name)
        if name != key:
            merged[name] = [*(known or []), *(value if isinstance(value, list) else [value])]
        elif isinstance(known, dict) and isinstance(value, dict) and not _is_other_class(known, value):
            merged[name] = _merge(known, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def _is_other_class(known: dict[str, Any], value: dict[str, Any]) -> bool:
    return "class_path" in value and value["class_path"] != known.get("class_path")


def apply_values(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config with these values of dotted keys.

    Raises:
        DloError: A key does not lead to a place in the config.
    """
    new_config = copy.deepcopy(config)
    for key, value in values.items():
        set_key(new_config, key, copy.deepcopy(value))
    return new_config


def set_key(config: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key of a config in place, and creates the mappings on its way.

    A part of the key selects an item of a list by its index, or by its class: ``trainer.callbacks.OneCycle.init_args``.

    Raises:
        DloError: The key leads through a value that is not a mapping, or to no item of a list.
    """
    parts = key.split(".")
    place: Any = config
    for number, part in enumerate(parts[:-1]):
        shown = ".".join(parts[: number + 1])
        if isinstance(place, list):
            place = place[_index(place, part, key)]
        elif place.get(part) is None:
            place[part] = {}
            place = place[part]
        else:
            place = place[part]
        if not isinstance(place, dict | list):
            raise DloError(
                f"space: {key} must lead through mappings, got {shown}: {place}; write {shown} as a class_path with"
                " init_args in the config, or leave the key out"
            )
    if isinstance(place, list):
        place[_index(place, parts[-1], key)] = value
    else:
        place[parts[-1]] = value


def _index(items: list[Any], part: str, key: str) -> int:
    """Returns the index of a list's item, by its number or by the name of its class."""
    if part.isdigit() and int(part) < len(items):
        return int(part)
    names = [str(item.get("class_path", "")).rpartition(".")[2] if isinstance(item, dict) else "" for item in items]
    if names.count(part) != 1:
        problem = f"got {names.count(part)} of '{part}'" if part in names else f"got '{part}'"
        raise DloError(
            f"space: {key} must select one item of the config's list, by its index below {len(items)} or its class,"
            f" {problem}{did_you_mean(part, [name for name in names if name]) or ';'} the config has:"
            f" {', '.join(name for name in names if name) or 'no class'}"
        )
    return names.index(part)


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
