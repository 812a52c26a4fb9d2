"""Report of a sweep: the table of its trials, the best config as YAML, and plots."""

from __future__ import annotations

import csv
import io
import json
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from dlo_framework.atomic_file import write_atomic
from dlo_framework.errors import DloError
from dlo_framework.units import format_table
from dlo_framework.yaml_text import read_yaml
from dlo_plugins.sweep.search_space import SearchSpace, SweepSettings, best_value, read_settings
from dlo_plugins.sweep.trial_process import CONFIG
from dlo_plugins.sweep.trial_queue import CALLBACK, ENDED_WITH, ERROR, RUN, TrialQueue

BEST, TABLE = "best.yaml", "trials.csv"
#: Name of a plot, and of Optuna's function that draws it.
PLOTS = {
    "history": "plot_optimization_history",
    "importance": "plot_param_importances",
    "parallel_coordinates": "plot_parallel_coordinate",
    "slices": "plot_slice",
    "curves": "plot_intermediate_values",
}


class SweepReport:
    """Report of the sweep in a folder, finished or not.

    Args:
        folder: Folder of the sweep.

    Raises:
        DloError: The folder has no sweep.
    """

    def __init__(self, folder: Path) -> None:
        settings = read_settings(folder)
        if settings is None:
            raise DloError(f"sweep: report needs the folder of a sweep, with sweep.json, got {folder}; see --folder")
        self.folder, self.settings = folder, settings
        self.study = TrialQueue(folder, settings).study
        self.trials = self.study.get_trials(deepcopy=False)
        self.sign = 1 if settings.direction == "maximize" else -1
        self.keys = sorted(one.key for one in SearchSpace(settings.space).dimensions if one.kind != "value")

    @property
    def best(self) -> FrozenTrial | None:
        """Best trial of those that have completed, or else of the pruned ones; None if there is none."""
        own = [trial for trial in self.trials if trial.value is not None]
        done = [trial for trial in own if trial.state == TrialState.COMPLETE] or own
        # By the best of its validations, which is that of its best checkpoint.
        values = [best_value(trial.intermediate_values.values(), self.settings.direction) for trial in done]
        known = [(self.sign * value, trial) for value, trial in zip(values, done, strict=True) if value is not None]
        return max(known, key=lambda pair: pair[0])[1] if known else next(iter(done), None)

    def write(self) -> list[str]:
        """Writes ``trials.csv``, ``best.yaml`` and the plots; returns what was written, and what was left out."""
        text, rows = io.StringIO(), self.rows()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(self.folder / TABLE, text.getvalue())
        written = [f"table: {self.folder / TABLE}"]
        best = self.best
        if best is not None:
            write_atomic(self.folder / BEST, best_config(self.folder, best, self.settings))
            written.append(f"best config: {self.folder / BEST} (dlo fit --config {self.folder / BEST})")
        return [*written, *write_plots(self.study, self.folder / "plots", self.settings.metric)]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row a trial: number, state, value, validations, seconds, its values and its run."""
        rows = []
        for trial in self.trials:
            reported, given = trial.intermediate_values.values(), values_of(trial)
            row: dict[str, Any] = {"trial": trial.number, "state": trial.state.name.lower()}
            row[self.settings.metric] = best_value(reported, self.settings.direction)
            row["validations"] = len(reported)
            row["seconds"] = None if trial.duration is None else round(trial.duration.total_seconds(), 1)
            row |= {key: given.get(key) for key in self.keys}
            rows.append(row | {name: trial.user_attrs.get(name, "") for name in (RUN, ERROR)})
        return rows

    def text(self, top: int = 10) -> str:
        """Returns the best trials as a table, and the numbers of trials by state."""
        rows, metric = self.rows(), self.settings.metric
        counts = {name: sum(row["state"] == name for row in rows) for name in ("complete", "pruned", "fail")}
        left = len(rows) - sum(counts.values())
        shown = [row for row in rows if row[metric] is not None]
        shown.sort(key=lambda row: (row["state"] != "complete", -self.sign * row[metric]))
        names = ["trial", "state", metric, "validations", "seconds", *self.keys]
        cells = [[name.rpartition(".")[2] for name in names]]
        cells += [[_cell(row[name]) for name in names] for row in shown[:top]]
        total = f"{len(rows)} trials: " + ", ".join(f"{count} {name}" for name, count in counts.items())
        return "\n".join([*format_table(cells, left=0), total + (f", {left} left" if left else "")])


def values_of(trial: FrozenTrial) -> dict[str, Any]:
    """Returns a trial's values of the space's keys; a population's member has those that it ended with."""
    return dict(trial.user_attrs.get(ENDED_WITH, trial.params))


def best_config(folder: Path, trial: FrozenTrial, settings: SweepSettings) -> str:
    """Returns the config of a trial as YAML for ``dlo fit``, without what the sweep has added.

    It is the one that the run saved, with all defaults filled in, or else the one that the trial was started with.
    """
    run = trial.user_attrs.get(RUN)
    path = folder / run / "config.yaml" if run else None
    if path is None or not path.exists():
        path = folder / "trials" / f"{trial.number:04d}" / CONFIG
    config = read_yaml(path)
    config.pop("run", None)
    callbacks = (config.get("trainer") or {}).get("callbacks") or []
    own = [one for one in callbacks if str(one.get("class_path", "")).rpartition(".")[2] != CALLBACK]
    config["trainer"]["callbacks"] = own or None
    value = best_value(trial.intermediate_values.values(), settings.direction)
    head = f"# Trial {trial.number} of the sweep {folder.name}: {settings.metric} {value:.6g}\n"
    head += f"# {json.dumps(values_of(trial))}\n"
    return head + yaml.safe_dump(config, sort_keys=False)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def write_plots(study: optuna.Study, folder: Path, metric: str) -> list[str]:
    """Writes the plots of a study as PNG and HTML; returns a line for each kind, and each plot that was left out.

    Args:
        study: Study with the trials.
        folder: Folder of the plots.
        metric: Name of the metric, for the axes.
    """
    done = [trial for trial in study.get_trials(deepcopy=False) if trial.state == TrialState.COMPLETE]
    if not done:
        return ["plots: none, since no trial has completed"]
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for kind, package in (("png", "matplotlib"), ("html", "plotly")):
        if find_spec(package) is None:
            lines.append(
                f"plots as {kind.upper()}: none, since {package} is not installed (pip install 'dlo_framework[hpo]')"
            )
            continue
        lines.append(f"plots: {folder}/*.{kind}")
        for name in PLOTS:
            why = _left_out(name, done)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if why is None:
                    _draw(study, name, folder / f"{name}.{kind}", metric)
            if name == "importance":  # Others say that functions are experimental, or that an axis has one value.
                lines += [f"plot {name}: none, since {why}"] if why else []
                kept = [one for one in said if not issubclass(one.category, optuna.exceptions.ExperimentalWarning)]
                lines += [f"plot {name}: {one.message}" for one in kept]
    return list(dict.fromkeys(lines))


def _left_out(name: str, done: list[Any]) -> str | None:
    """Returns why a plot cannot be drawn; None if it can."""
    if name != "importance":
        return None
    if len(done) < 2:
        return "it needs two completed trials"
    if len({trial.value for trial in done}) < 2:
        return "all trials have the same value"
    if not set.intersection(*(set(trial.params) for trial in done)):
        return "no key is set in all completed trials"
    return None


def _draw(study: optuna.Study, name: str, path: Path, metric: str) -> None:
    """Draws a plot with Optuna's function: with matplotlib for ``.png``, else as a page that needs no network."""
    target = {} if name == "curves" else {"target_name": metric}
    if path.suffix == ".html":
        draw = getattr(import_module("optuna.visualization"), PLOTS[name])
        draw(study, **target).write_html(path, include_plotlyjs=True)
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes = getattr(import_module("optuna.visualization.matplotlib"), PLOTS[name])(study, **target)
    figure = (axes.flat[0] if hasattr(axes, "flat") else axes).figure
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
