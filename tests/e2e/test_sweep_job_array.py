"""The shipped script of a sweep as a job array, end to end, on a stand-in for SLURM: a lost node, and a time limit."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from support import slurm_standin
from support.launchers import wait_until
from support.sweep_config import CONFIG

SCRIPT = Path(__file__).parents[2] / "configs" / "slurm" / "sweep.sbatch"
SPACE = {"model.init_args.lr": {"log": ["1e-4", "1e-1"]}}
TRIALS = 5


def write_script(place: Path) -> Path:
    """Writes the shipped script with two tasks, a small config and few trials; nothing else differs."""
    (place / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    (place / "space.yml").write_text(yaml.safe_dump(SPACE))
    text, changes = SCRIPT.read_text(), 0
    for old, new in {
        "--array=1-8": "--array=1-2",
        "--config digits/sweep --space digits/sweep_space": "--config tiny.yaml --space space.yml --sampler random",
        "--trials 100 --pruner asha": f"--trials {TRIALS}",
    }.items():
        changes += text.count(old)
        text = text.replace(old, new)
    assert changes == 3
    (place / "sweep.sbatch").write_text(text)
    return place / "sweep.sbatch"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tasks_of_an_array_share_trials_and_a_lost_node_and_a_time_limit_lose_none(tmp_path):
    script, notes = write_script(tmp_path), tmp_path / "slurm"
    notes.mkdir()
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST", "SLURM"))}
    mine |= {"PATH": f"{slurm_standin.install(tmp_path / 'bin')}:{os.environ['PATH']}", "SLURM_STANDIN": str(notes)}
    job = subprocess.Popen(["sbatch", script.name], cwd=tmp_path, env=mine)
    folder = tmp_path / "runs" / "sweeps" / "tiny"

    def reports(trial: int) -> list[dict[str, float]]:
        path = folder / "trials" / f"{trial:04d}" / "reports.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    wait_until(lambda: reports(0) and reports(1))  # Both tasks train.
    # A node fails: all processes of the first task are killed at once.
    os.killpg(int((notes / "task 1.pid").read_text()), signal.SIGKILL)
    wait_until(lambda: any(reports(number) for number in range(2, TRIALS)))
    # The second task comes near its time limit: the step gets the signal, saves, and the script puts the task back.
    os.kill(int((notes / "step 2.pid").read_text()), signal.SIGUSR1)
    assert job.wait(timeout=600) == 0, "\n".join(path.read_text()[-2000:] for path in notes.glob("*.log"))
    ended = [line.split() for line in (notes / "ended").read_text().splitlines()]
    assert ["1", "0", "-9"] in ended
    assert ["2", "0", "143"] in ended
    assert sum(code == "0" for _, _, code in ended) == 2
    report = subprocess.run(["dlo", "sweep", "report", str(folder)], cwd=tmp_path, env=mine, capture_output=True)
    assert report.returncode == 0, report.stderr
    assert re.search(rf"{TRIALS} trials: {TRIALS} complete, 0 pruned, 0 fail".encode(), report.stdout)
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert [row["trial"] for row in rows] == [str(number) for number in range(TRIALS)]
    assert len({row["model.init_args.lr"] for row in rows}) == TRIALS
    for number in range(TRIALS):
        runs = sorted((folder / "trials" / f"{number:04d}").glob("version_*"))
        saved = [run.name for run in runs if (run / "checkpoints" / "last.ckpt").exists()]
        assert saved == [runs[-1].name], "only a trial that was killed before its first checkpoint begins again"
        by_step: dict[float, float] = {}
        for one in reports(number):
            assert by_step.setdefault(one["step"], one["value"]) == one["value"], "a resumed run is the same run"
        assert sorted(by_step) == [1, 2, 3]
