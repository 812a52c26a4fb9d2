"""`dlo sweep --engine ray` on one machine: ASHA, and population-based training through dlo's checkpoints."""

import csv
import json
from pathlib import Path

import pytest
import yaml

from support.dlo_process import DloProcess
from support.sweep_config import CONFIG

pytest.importorskip("ray.tune")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def sweep(folder: Path, space: dict, *words: str) -> list[dict[str, str]]:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "space.yml").write_text(yaml.safe_dump(space))
    process = DloProcess(
        ["sweep", "--config", "tiny.yaml", "--space", "space.yml", "--engine", "ray", "--sampler", "random", *words],
        folder,
        {"OMP_NUM_THREADS": "1"},
    )
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out[-2000:] + err[-4000:]
    return list(csv.DictReader((folder / "runs" / "sweeps" / "tiny" / "trials.csv").open()))


def test_asha_of_ray_prunes_and_the_queue_has_the_results(tmp_path):
    space = {"model.init_args.lr": {"log": [1e-4, 1e-1]}}
    rows = sweep(tmp_path, space, "--trials", "4", "--jobs", "2", "--pruner", "asha", "--factor", "2")
    assert {row["state"] for row in rows} <= {"complete", "pruned"}
    assert [row["validations"] for row in rows if row["state"] == "complete"] != []
    assert all(row["validations"] == "3" for row in rows if row["state"] == "complete")
    assert len({row["model.init_args.lr"] for row in rows}) == 4


def test_members_of_a_population_continue_from_others_checkpoints_with_changed_values(tmp_path):
    """One member's rate is far too small: it continues from the other's checkpoint, with another rate."""
    space = {"model.init_args.lr": [1e-7, 3e-3, 1e-6, 1e-8]}
    words = ("--trials", "4", "--pruner", "pbt", "--first", "1", "--trainer.max_epochs", "4")
    rows = sweep(tmp_path, space, *words)
    assert [row["state"] for row in rows] == ["complete"] * 4
    trials = tmp_path / "runs" / "sweeps" / "tiny" / "trials"
    runs = {
        folder.name: sorted(folder.glob("version_*"), key=lambda version: int(version.name.partition("_")[2]))
        for folder in trials.iterdir()
    }
    copied = [folder for own in runs.values() for folder in own[1:]]
    assert copied, "no member was replaced"
    for folder in copied:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        callback = config["trainer"]["callbacks"][-1]["init_args"]
        assert callback["values"]["model.init_args.lr"] == config["model"]["init_args"]["lr"]
    for row in rows:  # The values that a member ended with.
        config = yaml.safe_load((runs[f"{int(row['trial']):04d}"][-1] / "config.yaml").read_text())
        assert float(row["model.init_args.lr"]) == config["model"]["init_args"]["lr"]
    summaries = [json.loads((own[-1] / "summary.json").read_text()) for own in runs.values()]
    assert [summary["steps"] for summary in summaries] == [16] * 4
