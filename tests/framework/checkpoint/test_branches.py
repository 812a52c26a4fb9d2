"""A run that resumes from an earlier checkpoint supersedes the later ones; ``last`` and ``auto`` skip these."""

import json
import shutil

import pytest
import torch

from dlo_framework.checkpoint import load, newest_valid, note_resumption, resumptions, save
from dlo_framework.errors import DloError
from dlo_framework.run import runs


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that has reached step 900, with a checkpoint each 100 steps."""
    for name in (runs.FOUND, "RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "x" / "version_0"
    for step in range(100, 1000, 100):
        keep(folder, step, f"step={step}.ckpt")
    keep(folder, 900, "last.ckpt")
    return folder


def keep(run, step: int, name: str) -> None:
    content = {"state_dict": {"w": torch.ones(1)}, "optimizer_states": [], "global_step": step, "epoch": 0}
    save(content, run / runs.CHECKPOINTS / name)


def newest(run) -> str:
    """Returns the name that ``last`` finds, which ``auto`` finds too."""
    found = runs.find_checkpoint(run.parent, "last")
    assert runs.unfinished(run.parent) == found
    return found.name


def go_on(run, name: str) -> None:
    note_resumption(run / runs.CHECKPOINTS / name)


def test_what_a_run_has_left_behind_is_not_gone_on_with(run):
    assert newest(run) == "last.ckpt"
    go_on(run, "step=500.ckpt")
    assert newest(run) == "step=500.ckpt", "killed before it has saved anything"
    keep(run, 600, "step=600-v1.ckpt")
    assert newest(run) == "step=600-v1.ckpt"
    keep(run, 650, "last.ckpt")
    assert newest(run) == "last.ckpt"
    assert load(run / "checkpoints" / "last.ckpt")["global_step"] == 650
    go_on(run, "last.ckpt")
    keep(run, 700, "last.ckpt")
    assert load(run / "checkpoints" / newest(run))["global_step"] == 700
    assert resumptions(run / "checkpoints") == 2


def test_a_finished_run_that_went_back_is_not_finished(run):
    (run / runs.SUMMARY).write_text(json.dumps({"status": "finished", "steps": 900}))
    assert runs.unfinished(run.parent) is None
    go_on(run, "step=500.ckpt")
    keep(run, 650, "last.ckpt")
    assert newest(run) == "last.ckpt"
    (run / runs.SUMMARY).write_text(json.dumps({"status": "finished", "steps": 650, "resumptions": 1}))
    assert runs.unfinished(run.parent) is None


def test_a_branch_that_was_left_may_be_taken_up_again(run):
    go_on(run, "step=500.ckpt")
    keep(run, 600, "step=600-v1.ckpt")
    go_on(run, "step=600.ckpt")
    assert newest(run) == "step=600.ckpt", "not the other branch's of the same step"
    go_on(run, "step=600-v1.ckpt")
    assert newest(run) == "step=600-v1.ckpt"
    go_on(run, "last.ckpt")
    assert load(run / "checkpoints" / newest(run))["global_step"] == 900


@pytest.mark.parametrize("kind", ["copied", "by a clock that is behind"])
def test_neither_clocks_nor_copies_change_the_answer(run, monkeypatch, kind, tmp_path):
    if kind == "by a clock that is behind":
        monkeypatch.setattr("time.time", lambda: 1.0)
    go_on(run, "step=500.ckpt")
    keep(run, 600, "step=600.ckpt")
    if kind == "copied":
        shutil.copytree(run, tmp_path / "y" / "version_0", copy_function=shutil.copy)
        run = tmp_path / "y" / "version_0"
    assert newest(run) == "step=600.ckpt"


def test_a_damaged_one_is_told_of_and_what_was_left_is_not_offered(run):
    (run / "checkpoints" / "step=900.ckpt" / "manifest.json").unlink()
    go_on(run, "step=500.ckpt")
    with pytest.warns(UserWarning, match=r"skipping .*step=900\.ckpt"):
        assert newest(run) == "step=500.ckpt"
    shutil.rmtree(run / "checkpoints" / "step=900.ckpt")
    (run / "checkpoints" / "step=500.ckpt" / "state.pt").unlink()
    with pytest.raises(DloError, match=r"the newest valid one beside it is .*step=400\.ckpt$"):
        load(run / "checkpoints" / "step=500.ckpt")
    with pytest.warns(UserWarning, match=r"skipping .*step=500\.ckpt"):
        assert newest(run) == "step=400.ckpt"


def test_single_files_too_and_a_note_that_cannot_be_read_is_none(tmp_path):
    for step in (5, 9):
        content = {"state_dict": {}, "optimizer_states": [], "global_step": step, "pytorch-lightning_version": "2.6.6"}
        torch.save(content, tmp_path / f"{step}.ckpt")
    note_resumption(tmp_path / "5.ckpt")
    assert newest_valid(tmp_path) == tmp_path / "5.ckpt"
    (tmp_path / "resumed.jsonl").write_text("not JSON\n")
    assert newest_valid(tmp_path) == tmp_path / "9.ckpt"
