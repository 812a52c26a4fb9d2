"""A run that is killed after a save or stopped anywhere, and resumed, equals the undisturbed run to the bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlo_framework.testing import run_distributed
from support.resumed_runs import (
    UNDISTURBED,
    Event,
    Scenario,
    choose,
    choose_ranks,
    differences,
    differences_on_ranks,
)

kill, stop, error = (partial(Event, kind) for kind in ("kill", "stop", "error"))
#: After a batch of training.
killed, stopped = (partial(Event, kind, "on_train_batch_end") for kind in ("kill", "stop"))
#: Kinds of interruptions that lost something once.
CASES = {
    "a plateau's step at an epoch's end": Scenario(
        1, schedule="plateau", check=0, events=(kill("on_train_epoch_end", 1), kill("on_train_epoch_end", 1))
    ),
    "a plateau's step after a batch": Scenario(
        2, schedule="plateau step", epochs=2, events=(killed(4), kill("on_validation_end", 1))
    ),
    "manual accumulation": Scenario(3, manual=True, accumulate=3, epochs=2, events=(stop("on_train_batch_start", 5),)),
    "double precision": Scenario(4, precision="64-true", epochs=2, events=(stopped(9),)),
    "accumulation by epoch": Scenario(5, callbacks=("gas",), events=(killed(11),)),
    "means over an epoch that stop the run": Scenario(6, callbacks=("early train",), check=0.5, events=(stopped(4),)),
    "the validation of growing batches": Scenario(7, callbacks=("growing batch",), events=(stopped(7), killed(2))),
    "a shuffled order, stopped in a validation": Scenario(
        8, loader="shuffled", accumulate=2, epochs=2, events=(stop("on_validation_batch_start", 3), killed(3))
    ),
    "the order of workers that persist": Scenario(
        9, loader="persistent", events=(killed(3), stop("on_validation_batch_start", 9))
    ),
    "an epoch whose start is saved": Scenario(
        10, loader="shuffled", max_steps=17, events=(kill("on_train_epoch_start", 2),)
    ),
    "an epoch without a validation": Scenario(11, check=0, epochs=2, events=(stopped(7),)),
    "a validation of rounded weights": Scenario(13, "image", check=0.5, callbacks=("quantise",), events=(killed(13),)),
    "an early stop inside an epoch, in a validation": Scenario(
        14, check=3, accumulate=2, callbacks=("early train",), events=(stop("on_validation_batch_start", 12),)
    ),
    "an early stop by a limit, whose validation is left": Scenario(
        15, check=3, min_steps=9, callbacks=("early limit",), events=(stopped(9),)
    ),
    "a shuffled loader that is made again every two epochs": Scenario(
        17, loader="shuffled", reload=2, epochs=4, events=(killed(11), stopped(9))
    ),
    "a scaler of losses": Scenario(
        16, precision="16-mixed", accumulate=2, manual=True, epochs=2, events=(killed(5), stopped(6))
    ),
    "metrics that a batch logs before it raises": Scenario(18, epochs=2, events=(error("on_before_backward", 5),)),
    "augmentation of a batch that raised": Scenario(
        19, loader="shuffled", epochs=2, events=(error("on_train_batch_start", 12),)
    ),
    "the mixture of a batch that raised": Scenario(
        20, "image", callbacks=("mix",), events=(error("on_train_batch_start", 3),)
    ),
    "a validation's loader that is made inside an epoch": Scenario(
        21, loader="shuffled", check=3, reload=1, epochs=2, events=(error("on_before_backward", 14),)
    ),
    "pruning beside the average of a schedule-free optimizer": Scenario(
        22, "image", optimizer="adamw_schedulefree", accumulate=3, check=3, callbacks=("prune",), events=(stopped(4),)
    ),
    "an average of weights": Scenario(
        12, callbacks=("ema",), precision="bf16-true", loader="generator", epochs=2, events=(killed(10),)
    ),
}


#: Seeds of cases that take seconds, of what tests of each plug-in show with another interruption.
LONG = (9, 13, 20, 22)


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(case, id=name, marks=[pytest.mark.slow] * (case.seed in LONG)) for name, case in CASES.items()],
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path, scenario: Scenario) -> None:
    assert differences(scenario, tmp_path) == []


#: Errors of all ranks, by strategy and size of the accumulation window, and the steps from which the run goes on.
ERRORS = {
    ("ddp", 1): ((error("training_step", 5), error("on_train_batch_start", 2)), [4, 5]),
    ("zero3", 1): ((error("training_step", 5), error("on_before_backward", 2)), [4, 5]),
    ("fsdp", 1): ((error("training_step", 5),), [4]),
    # The second is in backward, which changes the window's gradients: the last checkpoint is that of the first.
    ("fsdp", 2): ((error("on_train_batch_start", 5), error("on_before_backward", 2)), [2, 2]),
}


def _raised(rank: int, world_size: int, folder: str, cases: list[tuple[str, int]]) -> dict[Any, Any]:
    found = {}
    for name, window in cases:
        events, _ = ERRORS[name, window]
        place = Path(folder) / f"{name} {window}"
        wrong = differences(Scenario(3, strategy=name, ranks=2, accumulate=window, epochs=1, events=events), place)
        lines = (place / "parts" / "run" / "version_0" / "checkpoints" / "resumed.jsonl").read_text().splitlines()
        found[name, window] = wrong, [json.loads(line)["step"] for line in lines]
    return found


@pytest.mark.parametrize("cases", [[("zero3", 1), ("fsdp", 2)], pytest.param([*ERRORS], marks=pytest.mark.slow)])
def test_ranks_that_all_raise_save_the_state_before_the_batch(tmp_path: Path, cases: list[tuple[str, int]]) -> None:
    for found in run_distributed(_raised, 2, str(tmp_path), cases, timeout=300.0):
        assert found == {case: ([], ERRORS[case][1]) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 20))
def test_random_runs_of_one_process(tmp_path: Path, first: int) -> None:
    found = {seed: differences(choose(seed), tmp_path / str(seed)) for seed in range(first, first + 20)}
    assert {choose(seed): lines for seed, lines in found.items() if lines not in ([], [UNDISTURBED])} == {}
    assert sum(lines == [] for lines in found.values()) >= 14


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_random_runs_of_two_ranks(tmp_path: Path, first: int) -> None:
    seeds = list(range(first, first + 10))
    found = run_distributed(differences_on_ranks, 2, seeds, str(tmp_path), timeout=600.0)
    wrong = [(choose_ranks(s), lines) for by_seed in found for s, lines in by_seed.items() if lines]
    assert [each for each in wrong if each[1] != [UNDISTURBED]] == []
    assert sum(lines == [] for lines in found[0].values()) >= 6
