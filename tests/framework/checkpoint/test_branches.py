"""A run's checkpoints by name: `last`, `best` and `auto`, where earlier ones supersede the later."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from dlo_framework.checkpoint import load, newest_valid, note_resumption, resumptions, save
from dlo_framework.cli.main import main
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


# --- ``dlo checkpoint ... last | best``: the checkpoint of a run, without its path -----------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs called ``a``, of which the older has the later files, and one called ``b``, the newest."""
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()  # Data of the same name.
    for time, (name, step) in enumerate({"a/version_1": 1, "a/version_0": 2, "b/version_0": 3}.items()):
        checkpoints = Path("runs", name, runs.CHECKPOINTS)
        for file in ("last.ckpt", "top.ckpt"):
            content = {"state_dict": {"w": torch.tensor([float(step)])}, "global_step": step, "epoch": 0}
            save({**content, "optimizer_states": [], "loops": {}}, checkpoints / file)
        summary = {"best_checkpoint": "checkpoints/top.ckpt", "status": "finished", "steps": step}
        (checkpoints.parent / runs.SUMMARY).write_text(json.dumps(summary))
        os.utime(checkpoints, (time + 1, time + 1))
    yield tmp_path
    os.environ.pop(runs.FOUND, None)


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["last"], 3),
        (["best"], 3),
        (["last", "--run", "a"], 1),
        (["best", "--run", "a"], 1),
        (["last", "--run", "runs/a"], 1),
        (["best", "--run", "runs/a/version_0"], 2),
        (["runs/a/version_0/checkpoints/last.ckpt"], 2),
    ],
)
def test_a_run_s_checkpoint_is_found(folder, capsys, words, step):
    assert main(["checkpoint", "inspect", *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["step"] == step
    named = words[0] in ("last", "best")
    assert printed.err.startswith(f"{words[0]}: runs/") if named else not printed.err, "which one was meant"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["last", "--run", "bb"], "--run must name a run in runs/, or a folder, got bb; did you mean 'b'?"),
        (["x.ckpt", "--run", "b"], "--run must come with last or best, got the path x.ckpt; remove --run"),
    ],
)
def test_what_is_not_there_is_told(folder, capsys, words, message):
    assert main(["checkpoint", "inspect", *words]) == 2
    assert message in capsys.readouterr().err


def test_no_run_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "verify", "last"]) == 2
    assert "--run must name a run, got none, and there is none in" in capsys.readouterr().err
