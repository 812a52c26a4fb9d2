"""benchmarks/chaos.py with few trials: nothing is lost, nothing hangs; and a run that is lost is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def trials(load):
    return load("chaos_runs.trials")


def test_trials_are_drawn_alike_each_time_and_have_every_fault_on_every_run(trials):
    runs = list(trials.RUNS)
    count = len(runs) * len(trials.FAULTS)
    drawn = [trials.draw(number, 0, runs) for number in range(count)]
    assert drawn == [trials.draw(number, 0, runs) for number in range(count)]
    met = {(trial.run, trial.fault) for trial in drawn}
    killed = {(run, fault) for run in runs if run != trials.ELASTIC for fault in trials.FAULTS}
    assert met == killed | {(trials.ELASTIC, trials.NODE)}
    assert {trials.draw(number, 0, runs[:1], ["KILL"]).fault for number in range(9)} == {"KILL"}
    assert {trials.draw(number, 0, runs).place for number in range(50)} == set(trials.PLACES)


@pytest.mark.slow
def test_runs_that_meet_faults_end_with_the_same_figures(tmp_path, trials):
    words = [sys.executable, str(BENCHMARKS / "chaos.py"), "--trials", "6", "--epochs", "2", "--folder", str(tmp_path)]
    runs = ["--runs", "quick start", "zero3 on 2 ranks"]
    done = subprocess.run(
        [*words, *runs], capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "80"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])["tables"][-1]["rows"]
    assert counts["lost"]["median"] == counts["hung"]["median"] == 0
    wrong = trials.carry_out(
        trials.Trial("quick start", "KILL", "step", 0.1), tmp_path / "wrong", 1, {"metrics": {"val_loss": 0.0}}
    )
    assert "val_loss" in wrong.lost
    assert not wrong.hung
