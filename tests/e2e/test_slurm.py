"""`dlo fit` as SLURM starts it: a process a task, told by the environment which it is; and the scripts that do so."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.launchers import free_port, slurm_task

SCRIPTS = sorted((Path(__file__).parents[2] / "configs" / "slurm").glob("*.sbatch"))
FAST = ["--trainer.limit_train_batches", "6", "--trainer.limit_val_batches", "1", "--data.init_args.image_size", "16"]
WORDS = [*FAST, "--trainer.max_epochs", "2", "--trainer.accelerator", "cpu", "--trainer.devices", "2"]


def start(dlo, rank: int, ranks: int, port: int, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "dlo_framework", "fit", *words],
        cwd=dlo.folder,
        env=dlo.environment() | slurm_task(rank, ranks, port),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_tasks_are_two_ranks_that_stop_on_the_warning_and_go_on(dlo, curve):
    words = ["--config", "quickstart", *WORDS, "--trainer.strategy", "zero2", "--trainer.log_every_n_steps", "1"]
    words += ["--ckpt_path", "auto", "--run.name"]
    port = free_port()
    tasks = [start(dlo, rank, 2, port, *words, "whole") for rank in range(2)]
    for task in tasks:
        _, err = task.communicate(timeout=200)
        assert task.returncode == 0, err[-4000:]
    # The same, warned in mid-run: each task gets the signal, as srun passes it on.
    port, slow = free_port(), ["--trainer.max_epochs", "40"]
    tasks = [start(dlo, rank, 2, port, *words, "torn", *slow) for rank in range(2)]
    saved = dlo.folder / "runs" / "torn" / "version_0" / "checkpoints" / "last.ckpt"
    until = time.monotonic() + 150
    while not saved.exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    for task in tasks:
        task.send_signal(signal.SIGUSR1)
    for task in tasks:
        _, err = task.communicate(timeout=60)
        assert task.returncode == 143, err[-4000:]
    first = curve(dlo.folder / "runs" / "torn" / "version_0")
    port = free_port()
    tasks = [start(dlo, rank, 2, port, *words, "torn", *slow, "--trainer.max_epochs", "40") for rank in range(2)]
    until = time.monotonic() + 150
    while len(found := curve(dlo.folder / "runs" / "torn" / "version_0")) <= len(first) + 3:
        assert time.monotonic() < until
        time.sleep(0.5)
    for task in tasks:
        task.send_signal(signal.SIGTERM)
    for task in tasks:
        task.communicate(timeout=60)
        assert task.returncode == 143
    whole = curve(dlo.folder / "runs" / "whole" / "version_0")
    assert sorted(found) == list(range(1, max(found) + 1))  # No step is missing.
    assert [found[step] for step in sorted(first)] == [first[step] for step in sorted(first)]
    assert len(whole) == 12


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_right(dlo, script):
    text = script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert re.search(r"#SBATCH --signal=USR1@\d+", text)
    assert "#SBATCH --requeue" in text
    name = re.search(r"--config (\S+)", text)
    assert name is not None
    dlo("configs", name.group(1))
