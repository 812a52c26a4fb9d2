"""Plots of a sweep, and what Optuna says of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from dlo_plugins.sweep.search_space import make_sampler

optuna = pytest.importorskip("optuna")


def study_of(momenta: list[float | None]) -> object:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    for number, momentum in enumerate(momenta):
        params = {"lr": 10.0 ** -(number % 4), "optimizer": "adamw" if momentum is None else "sgd"}
        spread = {
            "lr": optuna.distributions.FloatDistribution(1e-5, 1.0, log=True),
            "optimizer": optuna.distributions.CategoricalDistribution(["adamw", "sgd"]),
        }
        if momentum is not None:
            params["momentum"], spread["momentum"] = momentum, optuna.distributions.FloatDistribution(0.5, 1.0)
        trial = optuna.trial.create_trial(
            params=params, distributions=spread, value=0.1 * number, intermediate_values={1: 0.05 * number}
        )
        study.add_trial(trial)
    return study


def test_a_key_with_few_trials_is_one_line_of_the_report(tmp_path: Path) -> None:
    from dlo_plugins.sweep.sweep_report import write_plots

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lines = write_plots(study_of([0.9, None, None, None]), tmp_path, "val_acc1")  # type: ignore[arg-type]
    assert [str(one.message) for one in said] == []
    assert {path.stem for path in tmp_path.glob("*.png")} >= {"history", "importance", "curves"}
    (line,) = (line for line in lines if line.startswith("plot importance"))
    assert "momentum" in line
    assert "less than 2 trials" in line


def test_a_sampler_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("tpe", "gp", "cmaes", "random"):
            make_sampler(name, 0, pruned=True)
