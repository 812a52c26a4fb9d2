"""Workers that are killed at random times: no trial is lost or run twice. The benchmark's own code, with few kills."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FAULTS = ("lost", "at_the_same_time", "again_after_its_end", "values_lost")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("sweep")


def test_kills_of_workers_lose_and_double_no_trial(benchmark, tmp_path):
    found = benchmark.kill_workers(tmp_path / "sweep", 3, seed=1)
    assert found["kills"] == 3
    assert found["trials"] == 18
    assert found["kills_inside_a_trial"] >= 1
    assert {name: found[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
