"""``dlo checkpoint ... last | best``: the checkpoint of a run, without its path."""

import json
import os
from pathlib import Path

import pytest
import torch

from dlo_framework.checkpoint import save
from dlo_framework.cli.main import main
from dlo_framework.run import runs


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
