"""Predictions of `dlo plan` beside what was measured: the order of steps, and memory; see planner_measured.py."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from dlo_plugins.plan.machine import load_machine

STORED: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("planner_measured.json").read_text())


@pytest.fixture
def benchmark(load: Any) -> Any:
    return load("planner_measured")


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_order_of_predicted_steps_is_that_of_measured_ones(benchmark: Any, ranks: int) -> None:
    names = {f"{one}, {one.ranks} ranks": one for one in benchmark.TIME}
    cases = [(names[name], seconds) for name, seconds in STORED["step_ms"].items() if names[name].ranks == ranks]
    guesses = [benchmark.predicted(one, load_machine("cpu")).time.total for one, _ in cases]
    assert benchmark.rank_correlation(guesses, [seconds for _, seconds in cases]) >= 0.9


@pytest.mark.slow
def test_predicted_memory_is_within_a_tenth_of_measured(benchmark: Any) -> None:
    names, machine = {f"{one}, {one.ranks} ranks": one for one in benchmark.MEMORY}, load_machine("cpu")
    errors = {}
    for name, size in STORED["memory_mb"].items():
        memory = benchmark.predicted(names[name], machine).memory
        errors[name] = (memory.total - memory.overhead) / 1e6 / size - 1
    assert max(map(abs, errors.values())) < 0.1, errors
    assert statistics.mean(map(abs, errors.values())) < 0.03
