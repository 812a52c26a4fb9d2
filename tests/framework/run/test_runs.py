"""Run folders, the checkpoints that later runs find in them, and ``--ckpt_path auto``."""

import json
import os

import pytest
import torch

from dlo_framework import run_setup
from dlo_framework.checkpoint import load, note_resumption, save
from dlo_framework.errors import DloError
from dlo_framework.run import runs


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (runs.ENVIRONMENT, runs.FOUND, "RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.pop(runs.FOUND, None)  # Set by the code under test, after monkeypatch has read it.


def keep(run, step, name="last.ckpt", best=None):
    """Saves a checkpoint as a run does whose ModelCheckpoint has recorded ``best``."""
    kept = {"monitor": "val", "best_model_path": str(best)} if best else {"monitor": None, "best_model_path": "x"}
    content = {"state_dict": {"w": torch.ones(1)}, "optimizer_states": [], "global_step": step, "epoch": 0}
    save({**content, "callbacks": {"Other": {"n": 1}, "ModelCheckpoint": kept}}, run / "checkpoints" / name)
    return run / "checkpoints" / name


def summarise(run, best, **fields):
    run.mkdir(parents=True, exist_ok=True)
    (run / "summary.json").write_text(json.dumps({"best_checkpoint": best, **fields}))


def test_runs_are_numbered_and_gaps_are_not_filled(tmp_path):
    assert runs.new_run(tmp_path).name == "version_0"
    assert runs.new_run(tmp_path).name == "version_1"
    (tmp_path / "version_7").mkdir()
    (tmp_path / "version_x").mkdir()
    assert runs.new_run(tmp_path).name == "version_8"


def test_two_jobs_at_once_get_two_folders(tmp_path, monkeypatch):
    """Between a job's check of the folder and its mkdir, another job may have taken the number."""
    monkeypatch.setattr(runs, "versions", lambda folder: [])
    (tmp_path / "version_0").mkdir()
    assert runs.new_run(tmp_path).name == "version_1"


def test_the_ranks_that_rank_0_starts_use_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")  # Variables of a job's shell: all its processes have them.
    first = runs.new_run(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.new_run(tmp_path) == first
    assert runs.new_run(tmp_path).name == "pending", "told once: a second run in this process is another"


def test_a_second_run_in_one_process_has_a_folder_of_its_own(tmp_path, monkeypatch):
    """A ``dlo`` that a run starts, and a rank that resumes another run, do not get the first one's answer."""
    assert [runs.new_run(tmp_path / "a").name for _ in range(2)] == ["version_0", "version_1"]
    assert runs.new_run(tmp_path / "b") == tmp_path / "b" / "version_0"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.new_run(tmp_path / "a").name == "pending"
    assert runs.new_run(tmp_path / "b").name == "version_0"


def test_a_second_run_in_one_process_looks_anew_for_its_checkpoint(tmp_path, monkeypatch):
    for number in range(2):
        last = keep(tmp_path / f"version_{number}", 5)
        assert runs.find_checkpoint(tmp_path, "last") == runs.unfinished(tmp_path) == last
    newer = keep(tmp_path / "version_2", 5)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.unfinished(tmp_path) == last, "a rank takes the word of the one that has started it"
    assert runs.unfinished(tmp_path) == newer, "for one run"


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID", "LOCAL_RANK"])
def test_other_ranks_make_no_folder(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    runs.new_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_best_is_what_the_summary_names(tmp_path):
    folder = tmp_path / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "best.ckpt").touch()
    with pytest.raises(DloError, match="has a best checkpoint"):
        runs.find_checkpoint(tmp_path, "best")
    (tmp_path / "version_0" / "summary.json").write_text(json.dumps({"best_checkpoint": "checkpoints/best.ckpt"}))
    assert runs.find_checkpoint(tmp_path, "best") == folder / "best.ckpt"


def test_best_of_a_run_that_was_killed_is_what_its_newest_checkpoint_says(tmp_path):
    """A summary is written at a run's end: one that was killed, or still runs, has none, or that of an earlier end."""
    summarise(tmp_path / "version_0", "checkpoints/old.ckpt", status="finished", steps=9)
    keep(tmp_path / "version_0", 9, "old.ckpt")
    run = tmp_path / "version_1"
    first = keep(run, 5, "epoch=0.ckpt", run / "checkpoints" / "epoch=0.ckpt")
    keep(run, 8, best=first)
    assert runs.find_checkpoint(tmp_path, "best") == first
    summarise(run, "checkpoints/epoch=0.ckpt", status="interrupted: RunStopped", steps=8)
    note_resumption(run / "checkpoints" / "last.ckpt")
    better = keep(run, 12, "epoch=1.ckpt", run / "checkpoints" / "epoch=1.ckpt")
    keep(run, 15, best=better)
    assert runs.find_checkpoint(tmp_path, "best") == better


@pytest.mark.parametrize("moved", [False, True])
def test_best_of_a_killed_run_is_found_where_the_run_is_now(tmp_path, moved):
    was = tmp_path / "elsewhere" / "version_0"
    best = keep(tmp_path / "version_0", 5, "epoch=0.ckpt")
    last = keep(tmp_path / "version_0", 8, best=was / "checkpoints" / "epoch=0.ckpt")
    if moved:
        content = load(last)
        save({**content, "state_dict": dict(content["state_dict"]), "run_folder": str(was)}, last)
        assert runs.find_checkpoint(tmp_path, "best") == best
    else:
        with pytest.raises(DloError, match=r"epoch=0\.ckpt, which does not exist; .*or the path"):
            runs.find_checkpoint(tmp_path, "best")


def test_best_of_an_older_run_is_never_given_for_the_newest_without_a_word(tmp_path):
    summarise(tmp_path / "version_0", "checkpoints/old.ckpt", status="finished", steps=9)
    old = keep(tmp_path / "version_0", 9, "old.ckpt")
    (tmp_path / "version_1").mkdir()
    with pytest.warns(UserWarning, match="skipping .*version_1: it has no checkpoint"):
        assert runs.find_checkpoint(tmp_path, "best") == old
    keep(tmp_path / "version_1", 3)
    with pytest.raises(DloError, match=r"best: the newest run, .*version_1, has none; .*or the path"):
        runs.find_checkpoint(tmp_path, "best")


def test_a_full_disk_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(DloError, match=r"no space in the run folder: need 16\.8 MB, 1\.0 kB free"):
        runs.new_run(tmp_path)


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DloError, match=r"cannot create the run folder .*; choose another with --run\.dir"):
        runs.new_run(tmp_path / "file")


# --- auto: the newest run is resumed if it has not finished; else a new one starts ---------------------------------


def make_run(folder, number: int, step: int | None, status: str | None = None, steps: int = 0):
    """Creates a run with a checkpoint at a step, and a summary."""
    run = folder / f"version_{number}"
    (run / runs.CHECKPOINTS).mkdir(parents=True)
    if step is not None:
        content = {"state_dict": {"w": torch.ones(2)}, "optimizer_states": [], "global_step": step, "epoch": 0}
        save(content, run / runs.CHECKPOINTS / runs.LAST)
    if status is not None:
        (run / runs.SUMMARY).write_text(json.dumps({"status": status, "steps": steps}))
    return run / runs.CHECKPOINTS / runs.LAST


def test_a_run_that_was_killed_or_stopped_goes_on(tmp_path):
    assert runs.unfinished(tmp_path / "none") is None
    make_run(tmp_path, 0, 90, "finished", 90)
    killed = make_run(tmp_path, 1, 30)
    assert runs.unfinished(tmp_path) == killed
    stopped = make_run(tmp_path, 2, 40, "interrupted: RunStopped", 40)
    assert runs.unfinished(tmp_path) == stopped


def test_nor_does_an_older_one_for_a_run_that_has_no_checkpoint_yet(tmp_path):
    make_run(tmp_path, 0, 30)
    make_run(tmp_path, 1, None)
    assert runs.unfinished(tmp_path) is None


def test_a_finished_run_that_was_made_longer_and_killed_goes_on(tmp_path):
    longer = make_run(tmp_path, 0, 120, "finished", 90)
    assert runs.unfinished(tmp_path) == longer


def test_a_new_run_after_a_finished_one_is_told_of(tmp_path, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(run_setup, "rank_zero_info", lines.append)

    def start() -> str:
        lines.clear()
        assert run_setup.find_start_checkpoint("auto", lambda: tmp_path, trains=True) == (None, True)
        return "".join(lines)

    assert not start(), "the first run of its name"
    make_run(tmp_path, 0, 90, "finished", 90)
    assert f"ckpt_path auto: {tmp_path}/version_0 has finished after 90 steps, so a new run starts" in start()
    assert f"set ckpt_path to {tmp_path}/version_0/checkpoints/last.ckpt, and trainer.max_epochs or" in start()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not start(), "one line, of the first rank"
    monkeypatch.delenv("LOCAL_RANK")
    make_run(tmp_path, 1, None)
    assert not start(), "the newest has not finished"


@pytest.mark.parametrize("step", [30, None])
def test_the_ranks_that_this_process_starts_decide_alike(tmp_path, monkeypatch, step):
    found = make_run(tmp_path, 0, step)
    expected = None if step is None else found
    assert runs.unfinished(tmp_path) == expected
    make_run(tmp_path, 1, 50)  # Rank 0 creates its folder while the others start.
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.unfinished(tmp_path) == expected
