"""Space files: what they may say, the values that follow, a trial's config, and the plots of a sweep."""

from __future__ import annotations

import warnings
from pathlib import Path

import optuna
import pytest
import yaml

from dlo_framework.errors import DloError
from dlo_plugins.sweep.search_space import SearchSpace, apply_values, make_sampler, set_key

OPTIMIZER, MOMENTUM = "model.init_args.optimizer", "model.init_args.momentum"


def space(text: str) -> SearchSpace:
    return SearchSpace(yaml.safe_load(text))


FULL = """
a.lr: {log: [1e-4, 1e-1]}
a.momentum: {uniform: [0.5, 0.9], step: 0.2, when: {a.optimizer: sgd}}
a.optimizer: [sgd, adamw]
a.depth: {int: [2, 6], step: 2}
a.width: {log_int: [16, 64]}
a.fixed: {value: {x: 1}}
a.shape: {choice: [[1, 2], {k: 3}]}
"""


def samples(of: SearchSpace, number: int, seed: int = 0) -> list[dict]:
    study = optuna.create_study(sampler=make_sampler("random", seed))
    return [of.suggest(study.ask()) for _ in range(number)]


def test_values_are_within_their_ranges_and_keys_follow_their_conditions():
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = samples(space(FULL), 200)
    for one in found:
        assert 1e-4 <= one["a.lr"] <= 1e-1
        assert one["a.depth"] in (2, 4, 6)
        assert 16 <= one["a.width"] <= 64
        assert isinstance(one["a.width"], int)
        assert one["a.fixed"] == {"x": 1}
        assert one["a.shape"] in ([1, 2], {"k": 3})
        assert ("a.momentum" in one) == (one["a.optimizer"] == "sgd")
        assert round(one.get("a.momentum", 0.7), 6) in (0.5, 0.7, 0.9)
    assert {one["a.optimizer"] for one in found} == {"sgd", "adamw"}
    below = sum(one["a.lr"] < 10**-2.5 for one in found)
    assert 70 < below < 130, "half of a logarithmic range is below its geometric mean"


def test_a_grid_has_each_combination_once_and_no_key_whose_condition_is_not_met():
    grid = space(FULL.replace("{log: [1e-4, 1e-1]}", "[0.1, 0.2]").replace("{log_int: [16, 64]}", "[16]*2")
                 .replace("[16]*2", "[16, 32]")).grid()  # fmt: skip
    # lr 2 x width 2 x depth 3 x shape 2, and three momenta with sgd or none with adamw.
    assert len(grid) == 2 * 2 * 3 * 2 * (3 + 1)
    assert len({repr(sorted(point.items(), key=str)) for point in grid}) == len(grid)
    with_sgd = [point for point in grid if point["a.optimizer"] == "sgd"]
    assert sorted({round(point["a.momentum"], 6) for point in with_sgd}) == [0.5, 0.7, 0.9]
    assert not any("a.momentum" in point for point in grid if point["a.optimizer"] == "adamw")


def test_a_condition_on_a_key_that_has_one_is_left_out_with_it():
    one = space("a: [x, y]\nb: {choice: [1, 2], when: {a: x}}\nc: {choice: [3, 4], when: {b: [1, 2]}}\n")
    assert len(one.grid()) == 2 * 2 + 1
    assert [list(point) for point in one.grid() if point["a"] == "y"] == [["a"]]


def test_probes_hold_each_choice_and_both_ends_of_each_range():
    of = space(FULL)
    probes = of.probes()
    for key, values in {
        "a.lr": {1e-4, 1e-1}, "a.momentum": {0.5, 0.9}, "a.optimizer": {"sgd", "adamw"}, "a.depth": {2, 6},
        "a.shape": {"[1, 2]", "{'k': 3}"},
    }.items():  # fmt: skip
        assert {str(p[key]) if key == "a.shape" else p[key] for p in probes if key in p} >= values, key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 3", r"space: a must be a list of choices or a mapping, got 3; such as \[3\]"),
        ("a: [1, 1]", "space: a must have each choice once, got 1 twice"),
        ("a: {log: [0, 1]}", "space: a must be above 0 on a log scale, got 0"),
        ("a: {log: [2, 1]}", "space: a must have a low end below its high end, got [2, 1]".replace("[", r"\[")),
        ("a: {int: [1, 2.5]}", "space: a must have whole numbers as ends"),
        ("a: {log: [1, 2], step: 1}", "space: a: step must be left out with log"),
        ("a: [1, 2]\nb: {choice: [1, 2], when: {c: 1}}", "space: b: when must name keys of the space, got c"),
        ("a: [1, 2]\nb: {choice: [1, 2], when: {a: 3}}", "space: b: when must name values of a, got 3"),
        ("a: {choice: [1, 2], when: {b: 1}}\nb: {choice: [1, 2], when: {a: 1}}", "must not form a circle"),
        ("a: [1, 2]\na.b: [1, 2]", "space: keys must not contain each other, got a and a.b"),
    ],
)
def test_a_wrong_space_is_one_sentence_with_the_fix(text, message):
    with pytest.raises(DloError, match=message):
        space(text)


def test_a_continuous_range_has_no_grid():
    with pytest.raises(DloError, match=r"space: a must have a finite number of values under --sampler grid, got log"):
        space("a: {log: [1, 2]}").grid()


def test_options_that_the_space_sets_are_found():
    of = space("trainer.strategy: [ddp, zero2]\nmodel.init_args.lr: {log: [1e-4, 1e-1]}")
    words = ["--model.init_args.lr", "3", "--trainer.strategy.stage", "2", "--trainer.max_epochs", "3", "--model", "X"]
    assert [option for option, _ in of.conflicting(words)] == [
        "--model.init_args.lr", "--trainer.strategy.stage", "--model",
    ]  # fmt: skip


BASE = {
    "trainer": {"strategy": "ddp", "callbacks": [{"class_path": "OneCycle", "init_args": {"max_lr": 1}}, "Other"]},
    "model": {"class_path": "M", "init_args": {"lr": 1, "depth": 2}},
}


def test_values_are_set_in_a_copy_by_key_by_class_and_by_index():
    values = {
        "model.init_args.lr": 2,
        "model.init_args.new.deep": 3,
        "trainer.callbacks.OneCycle.init_args.max_lr": 4,
        "trainer.callbacks.0.init_args.pct": 5,
    }
    found = apply_values(BASE, values)
    assert found["model"]["init_args"] == {"lr": 2, "depth": 2, "new": {"deep": 3}}
    assert found["trainer"]["callbacks"][0]["init_args"] == {"max_lr": 4, "pct": 5}
    assert BASE["model"]["init_args"] == {"lr": 1, "depth": 2}


def test_a_key_that_leads_nowhere_is_an_error():
    with pytest.raises(DloError, match=r"got 'OneCycl'; did you mean 'OneCycle'\?"):
        set_key(apply_values(BASE, {}), "trainer.callbacks.OneCycl.init_args.max_lr", 1)
    with pytest.raises(DloError, match=r"must lead through mappings, got trainer\.strategy: ddp"):
        set_key(apply_values(BASE, {}), "trainer.strategy.init_args.stage", 1)


# --- plots of a sweep, and what Optuna says of them ------------------------------------------------------------------


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
