"""Plots of a sweep: history, importance, parallel coordinates, slices and curves, as PNG and as HTML."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

#: Name of a plot, and of Optuna's function that draws it.
PLOTS = {
    "history": "plot_optimization_history",
    "importance": "plot_param_importances",
    "parallel_coordinates": "plot_parallel_coordinate",
    "slices": "plot_slice",
    "curves": "plot_intermediate_values",
}


def write_plots(study: optuna.Study, folder: Path, metric: str) -> list[str]:
    """Writes the plots of a study; returns a line for each file or each plot that was left out.

    Args:
        study: Study with the trials.
        folder: Folder of the plots.
        metric: Name of the metric, for the axes.
    """
    done = [trial for trial in study.get_trials(deepcopy=False) if trial.state == TrialState.COMPLETE]
    if not done:
        return ["plots: none, since no trial has completed"]
    kinds = [f"*.{kind}" for kind, package in (("png", "matplotlib"), ("html", "plotly")) if has_package(package)]
    if not kinds:
        return ["plots: none, since matplotlib and plotly are not installed (pip install 'dlo_framework[hpo]')"]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"plots: {folder}/{' and '.join(kinds)}"]
    for name in PLOTS:
        why = _left_out(name, done)
        if why is not None:
            lines.append(f"plot {name}: none, since {why}")
            continue
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if "*.png" in kinds:
                write_png(study, name, folder / f"{name}.png", metric)
            if "*.html" in kinds:
                write_html(study, name, folder / f"{name}.html", metric)
        if name == "importance":  # Others say that Optuna's functions are experimental, or that an axis has one value.
            kept = [one for one in said if not issubclass(one.category, optuna.exceptions.ExperimentalWarning)]
            lines += dict.fromkeys(f"plot {name}: {one.message}" for one in kept)
    if "*.png" not in kinds:
        lines.append("plots as PNG: none, since matplotlib is not installed (pip install 'dlo_framework[hpo]')")
    if "*.html" not in kinds:
        lines.append("plots as HTML: none, since plotly is not installed (pip install 'dlo_framework[hpo]')")
    return lines


def _left_out(name: str, done: list[Any]) -> str | None:
    """Returns why a plot cannot be drawn; None if it can."""
    if name != "importance":
        return None
    if len(done) < 2:
        return "it needs two completed trials"
    if len({trial.value for trial in done}) < 2:
        return "all trials have the same value"
    shared = set.intersection(*(set(trial.params) for trial in done))
    if not shared:
        return "no key is set in all completed trials"
    return None


def _arguments(name: str, metric: str) -> dict[str, Any]:
    return {} if name == "curves" else {"target_name": metric}


def write_png(study: optuna.Study, name: str, path: Path, metric: str) -> None:
    """Draws a plot with matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from optuna.visualization import matplotlib as drawn

    draw: Callable[..., Any] = getattr(drawn, PLOTS[name])
    axes = draw(study, **_arguments(name, metric))
    first = axes.flat[0] if hasattr(axes, "flat") else axes
    first.figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(first.figure)


def write_html(study: optuna.Study, name: str, path: Path, metric: str) -> None:
    """Draws a plot with plotly, as a page that needs no network."""
    from optuna import visualization

    draw: Callable[..., Any] = getattr(visualization, PLOTS[name])
    draw(study, **_arguments(name, metric)).write_html(path, include_plotlyjs=True)


def has_package(name: str) -> bool:
    """Returns whether a package is installed."""
    return find_spec(name) is not None
