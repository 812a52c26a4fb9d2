"""A run that DeepSpeed's launcher has started: by its words and variables, and by the launcher itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.launchers import free_port

pytest.importorskip("deepspeed")

#: A few steps of the quick start's ViT.
RUN = (
    *("fit", "--config", "quickstart", "--deepspeed", "--deepspeed_config", "ds.json"),
    *("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.max_epochs", "1"),
    *("--trainer.limit_train_batches", "4", "--trainer.limit_val_batches", "1", "--data.init_args.batch_size", "32"),
)


def write_json(folder: Path) -> None:
    content = {"zero_optimization": {"stage": 2}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 16}
    (folder / "ds.json").write_text(json.dumps(content))


def test_a_run_takes_its_rank_from_the_launchers_variables(dlo, monkeypatch):
    """As ``deepspeed.launcher.launch`` (0.19.8) sets them; the JSON's batch sizes make an accumulation of 2."""
    write_json(dlo.folder)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "2"}
    for name, value in shared.items():
        monkeypatch.setenv(name, value)
    ranks = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        ranks.append(dlo.start(f"--local_rank={rank}", *RUN))
    outputs = [process.communicate(timeout=200) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert "DeepSpeedBridge on 2 rank(s)" in outputs[0][0]
    assert "epochs, steps    1, 2" in outputs[0][0]  # 4 micro-batches in steps of 2
    assert "DeepSpeedBridge" not in outputs[1][0]


@pytest.mark.slow
def test_deepspeeds_own_launcher_starts_a_run_from_a_hostfile(tmp_path):
    write_json(tmp_path)
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", "--no_ssh_check"]
    address = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    process = subprocess.Popen(
        [*launcher, *address, "--module", "dlo_framework", *RUN],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=250)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    assert "DeepSpeedBridge on 2 rank(s)" in output
    assert "epochs, steps    1, 2" in output
