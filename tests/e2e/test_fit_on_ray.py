"""`dlo fit --engine ray`, and the example of `TorchTrainer`, on Ray's cluster of one machine."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from dlo_framework import DloError
from dlo_framework.checkpoint import load
from dlo_framework.cli.main import main
from support.dlo_process import DloProcess
from support.launchers import wait_until
from support.sweep_config import CONFIG

ONCE = """
import os, pathlib
from lightning.pytorch import Callback

class KilledOnce(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        mark = pathlib.Path("killed")
        if trainer.global_rank == 1 and trainer.global_step == 6 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)
"""

SLOW = """
import time
from lightning.pytorch import Callback

class Slow(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(0.3)
"""


def test_a_command_line_for_ray_is_checked_before_ray_is_imported(capsys):
    for words, message in (
        (["--engine", "rey"], "unknown engine 'rey'; did you mean 'ray'?"),
        (["--engine=ray", "--workers", "4:2", "--config", "quickstart"], "--workers must be a number, or MIN:MAX"),
        (["--engine=ray", "--config", "quickstart"], "the following arguments are required: --workers"),
    ):
        assert main(["fit", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_starts_the_ranks_again_when_a_worker_is_killed(tmp_path):
    pytest.importorskip("ray.train")
    weights = []
    for name, engine, expected in (
        ("plain", ["--trainer.devices", "2"], 0),
        ("ray", ["--engine", "ray", "--workers", "2", "--worker_cpus", "0.1", "--max_restarts", "2"], 0),
        (
            "wrong",
            ["--engine", "ray", "--workers", "2", "--worker_cpus", "0.1", "--data.init_args.batch_size", "15"],
            2,
        ),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "once.py").write_text(ONCE)
        (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
        added = ["--plugins", "once.py", "--trainer.callbacks+", "once.KilledOnce"] if name == "ray" else []
        words = ["fit", "--config", "tiny.yaml", "--trainer.strategy", "zero2", "--ckpt_path", "auto", *added, *engine]
        process = DloProcess(words, folder, {"OMP_NUM_THREADS": "1"})
        out, err = process.communicate(timeout=400)
        assert process.returncode == expected, out[-2000:] + err[-4000:]
        if expected:
            assert "batch_size" in err
            continue
        run = folder / "runs" / "tiny" / "version_0"
        assert json.loads((run / "summary.json").read_text())["steps"] == 12
        weights.append(load(run / "checkpoints" / "last.ckpt")["state_dict"])
        if name == "ray":
            assert (folder / "killed").exists()
            reported = [json.loads(file.read_text())["path"] for file in folder.rglob("runs/ray/*/*/checkpoint.json")]
            assert {Path(path).parent for path in reported} == {(run / "checkpoints").resolve()}
    for key, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][key]), key


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_trains_on_four_workers(tmp_path):
    pytest.importorskip("ray.train")
    example = Path(__file__).parents[2] / "examples" / "ray_train.py"
    ended = subprocess.run(
        [sys.executable, str(example), "--workers", "4"], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert "trained 8 steps on 4 ranks" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ray_trains_on_the_nodes_that_are_there(tmp_path):
    """One of three nodes of a simulated cluster is lost, and another comes."""
    pytest.importorskip("ray.train")
    from ray.cluster_utils import Cluster

    (tmp_path / "slow.py").write_text(SLOW)
    config = CONFIG | {"trainer": CONFIG["trainer"] | {"max_epochs": 60, "strategy": "zero2"}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "runs" / "tiny" / "version_0"

    def sizes() -> list[int]:
        with contextlib.suppress(OSError, DloError):  # It may be replaced meanwhile.
            saved = load(run / "checkpoints" / "last.ckpt")["callbacks"]["RunRecord"]["world_sizes"]
            return [ranks for _, ranks in saved]
        return []

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = [cluster.add_node(num_cpus=1) for _ in range(2)][-1]
        words = ["fit", "--engine", "ray", "--workers", "1:3", "--max_restarts", "9", "--config", "tiny.yaml"]
        words += ["--ckpt_path", "auto", "--data.init_args.batch_size", "12"]
        words += ["--plugins", "slow.py", "--trainer.callbacks+", "slow.Slow"]
        process = DloProcess(words, tmp_path, {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": cluster.address})
        try:
            wait_until(lambda: sizes() == [3], 400)
            cluster.remove_node(lost)
            wait_until(lambda: sizes() == [3, 2], 400)
            cluster.add_node(num_cpus=1)
            out, err = process.communicate(timeout=600)
        finally:
            process.kill()
    finally:
        cluster.shutdown()
    assert process.returncode == 0, out[-2000:] + err[-4000:]
    summary = json.loads((run / "summary.json").read_text())
    assert [entry["ranks"] for entry in summary["world_sizes"]] == [3, 2, 3]
    assert summary["steps"] == 240
