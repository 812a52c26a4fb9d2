import json
import os

import pytest
import torch

from dlo_framework import runs
from dlo_framework.amounts import human
from dlo_framework.errors import DloError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (runs.ENVIRONMENT, runs.FOUND, "RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def new(folder):
    path = runs.new_run(folder)
    os.environ.pop(runs.ENVIRONMENT, None)
    return path


def test_runs_are_numbered_and_gaps_are_not_filled(tmp_path):
    assert new(tmp_path).name == "version_0"
    assert new(tmp_path).name == "version_1"
    (tmp_path / "version_7").mkdir()
    (tmp_path / "version_x").mkdir()
    assert new(tmp_path).name == "version_8"


def test_two_jobs_at_once_get_two_folders(tmp_path, monkeypatch):
    """Between a job's look at the folder and its mkdir, another job may have taken the number."""
    monkeypatch.setattr(runs, "versions", lambda folder: [])
    (tmp_path / "version_0").mkdir()
    assert new(tmp_path).name == "version_1"


def test_the_ranks_that_rank_0_starts_use_its_folder(tmp_path, monkeypatch):
    first = runs.new_run(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.new_run(tmp_path) == first
    os.environ.pop(runs.ENVIRONMENT, None)


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "LOCAL_RANK"])
def test_other_ranks_make_no_folder(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    runs.new_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_last_is_the_newest_run_that_has_one(tmp_path):
    for number in (2, 10):
        folder = tmp_path / f"version_{number}" / "checkpoints"
        folder.mkdir(parents=True)
        torch.save({"global_step": 1, "optimizer_states": []}, folder / "last.ckpt")
    (tmp_path / "version_11").mkdir()
    assert runs.find_checkpoint(tmp_path, "last") == tmp_path / "version_10" / "checkpoints" / "last.ckpt"


def test_best_is_what_the_summary_names(tmp_path):
    folder = tmp_path / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "best.ckpt").touch()
    with pytest.raises(DloError, match="has a best checkpoint"):
        runs.find_checkpoint(tmp_path, "best")
    (tmp_path / "version_0" / "summary.json").write_text(json.dumps({"best_checkpoint": "checkpoints/best.ckpt"}))
    assert runs.find_checkpoint(tmp_path, "best") == folder / "best.ckpt"


def test_a_full_disk_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(DloError, match=r"no space in the run folder: need 16\.8 MB, 1\.0 kB free"):
        runs.new_run(tmp_path)
    os.environ.pop(runs.ENVIRONMENT, None)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DloError, match=r"cannot make the run folder .*; choose another with --run\.dir"):
        runs.new_run(tmp_path / "file")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3.1e9, "3.1 GB"), (2e15, "2000.0 TB")]
)
def test_bytes_as_people_read_them(count, text):
    assert human(count) == text
