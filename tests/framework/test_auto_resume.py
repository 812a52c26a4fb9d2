"""``--ckpt_path auto``: the newest run is resumed if it has not finished; else a new one starts."""

import json
import os

import pytest
import torch

from dlo_framework import run_setup, runs
from dlo_framework.checkpoint import save


@pytest.fixture(autouse=True)
def first_process(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", runs.FOUND):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.pop(runs.FOUND, None)  # Set by the code under test, after monkeypatch has read it.


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


def test_no_run_is_a_new_start(tmp_path):
    assert runs.unfinished(tmp_path / "none") is None


def test_a_run_that_was_killed_or_stopped_goes_on(tmp_path):
    make_run(tmp_path, 0, 90, "finished", 90)
    killed = make_run(tmp_path, 1, 30)
    assert runs.unfinished(tmp_path) == killed
    stopped = make_run(tmp_path, 2, 40, "interrupted: RunStopped", 40)
    assert runs.unfinished(tmp_path) == stopped


def test_a_finished_run_does_not(tmp_path):
    make_run(tmp_path, 0, 30)
    make_run(tmp_path, 1, 90, "finished", 90)
    assert runs.unfinished(tmp_path) is None


def test_nor_does_an_older_one_for_a_run_that_has_no_checkpoint_yet(tmp_path):
    make_run(tmp_path, 0, 30)
    make_run(tmp_path, 1, None)
    assert runs.unfinished(tmp_path) is None


def test_a_finished_run_that_was_made_longer_and_killed_goes_on(tmp_path):
    longer = make_run(tmp_path, 0, 120, "finished", 90)
    assert runs.unfinished(tmp_path) == longer


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    last = make_run(tmp_path, 0, 30)
    older = last.with_name("epoch=0.ckpt")
    save({"state_dict": {"w": torch.ones(2)}, "optimizer_states": [], "global_step": 20, "epoch": 0}, older)
    shard = next(last.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    with pytest.warns(UserWarning, match="skipping"):
        assert runs.unfinished(tmp_path) == older


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
