"""Finished runs of benchmarks/curricula.py: a benchmark that was stopped does not repeat them."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def curricula(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("curricula")


def test_finished_runs_are_not_repeated(curricula, tmp_path, monkeypatch):
    trained = []

    def train(seed, length, callbacks, factor, folder):
        trained.append((seed, length, len(callbacks), factor))
        if len(trained) == 3:
            raise KeyboardInterrupt
        return curricula.Curve([1.0, 2.0], [4.0, 3.0 + seed], 8)

    monkeypatch.setitem(curricula.KINDS, "text", (train, curricula.KINDS["text"][1]))
    path, names = tmp_path / "runs.jsonl", ["lengths, truncated"]
    with pytest.raises(KeyboardInterrupt):
        curricula.contend("text", 1, 9, names, tmp_path, curricula.FinishedRuns(path))
    assert len(path.read_text().splitlines()) == 2
    found = curricula.contend("text", 1, 9, names, tmp_path, curricula.FinishedRuns(path))
    assert len(trained) == 4
    assert {curve.values[-1] for curves in found.values() for curve in curves} == {4.0}
    # Of another length, nothing is known.
    curricula.contend("text", 1, 8, names, tmp_path, curricula.FinishedRuns(path))
    assert len(trained) == 7
    again = curricula.contend("text", 1, 8, names, tmp_path, curricula.FinishedRuns(path))
    assert len(trained) == 7
    speed, reach = curricula.tables("text", again)
    assert speed.rows["lengths, truncated"]["n"] == 1
    assert reach.rows["lengths, truncated"]["bar"] == curricula.LENGTHS
