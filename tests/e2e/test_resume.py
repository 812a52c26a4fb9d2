"""Stopping and resuming through the command: the curve of a run that was interrupted is that of one that was not.

In the ordinary suite `tests/framework/run/test_resume.py` and `test_python_api.py` stop and resume runs.
"""

import json
import signal

import pytest

from support.digits_config import digits_config

PLAIN = ["--config", "small.yaml"]
TRAINER = "max_epochs: 4, limit_train_batches: 22, limit_val_batches: 2, log_every_n_steps: 2, accelerator: cpu"
CONFIG = digits_config(
    f"{TRAINER}, accumulate_grad_batches: 3",
    "patch_size: 4, embed_dim: 48, depth: 2, num_heads: 2, drop_path_rate: 0.2",
    "image_size: 16, batch_size: 32",
    "ema_decay: 0.9",
)


@pytest.mark.slow
def test_a_run_and_one_that_is_interrupted_have_one_curve(dlo, curve):
    """And two runs with one seed: the interrupted one begins as a run of its own."""
    (dlo.folder / "small.yaml").write_text(CONFIG)
    whole, cut = (dlo.folder / "runs" / name / "version_0" for name in ("whole", "cut"))
    dlo("fit", *PLAIN, "--run.name", "whole")
    # 22 batches an epoch, three a step, the last step of an epoch closing early; a point for each two steps.
    assert len(curve(whole)) == 4 * 8 // 2

    err = dlo.interrupt(signal.SIGINT, cut, "fit", *PLAIN, "--run.name", "cut")
    assert "go on with --ckpt_path last" in err
    summary = json.loads((cut / "summary.json").read_text())
    assert summary["status"] == "interrupted: RunStopped"
    assert 0 < summary["steps"] < 4 * 8

    (cut / "checkpoints" / "last.ckpt.dlo-partial").write_bytes(b"what a kill in the middle of a save leaves")
    dlo("fit", *PLAIN, "--run.name", "cut", "--ckpt_path", "last")
    assert not list((cut / "checkpoints").glob("*.dlo-partial"))
    assert [path.name for path in cut.parent.iterdir()] == ["version_0"], "one run, one folder"
    assert curve(cut) == curve(whole), "interrupted and resumed"
    assert curve(cut, "val_acc1") == curve(whole, "val_acc1")
    resumed = json.loads((cut / "summary.json").read_text())
    assert resumed["samples"] == 4 * 22 * 32
    assert summary["seconds"] < resumed["seconds"]
    assert resumed["training_seconds"] < resumed["seconds"]
