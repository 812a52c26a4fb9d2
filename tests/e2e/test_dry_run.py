"""``dlo fit --dry-run``: it says what the run then does, and leaves nothing behind."""

import json
import os
import re
from pathlib import Path

import lightning.pytorch  # noqa: F401  Its log handler keeps the stream it is imported with: not a test's.
import pytest

from dlo_framework.cli.main import main
from dlo_framework.run import runs
from support.digits_config import digits_config

TRAINER = "max_epochs: 2, accelerator: cpu, limit_val_batches: 1, limit_train_batches: 3"
CONFIG = digits_config(f"{TRAINER}, accumulate_grad_batches: 2")


@pytest.fixture
def dry(tmp_path, monkeypatch, capsys):
    """Returns a function that makes a dry run, and returns its rows."""
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(CONFIG)

    def run(*words: str) -> dict[str, str]:
        assert main(["fit", "--config", "x.yaml", "--dry-run", *words]) == 0
        lines = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        return {line[0]: line[1] for line in lines if len(line) == 2}

    return run


def test_it_says_what_the_run_does(dry, capsys):
    rows = dry()
    assert not Path("runs").exists()
    assert "time" not in rows
    assert rows["run folder"] == "runs/x/version_0"
    assert main(["fit", "--config", "x.yaml"]) == 0
    os.environ.pop(runs.ENVIRONMENT, None)
    capsys.readouterr()
    summary = json.loads(Path("runs/x/version_0/summary.json").read_text())
    assert int(rows["steps"]) == summary["steps"] == 4
    assert rows["strategy"] == f"{summary['strategy']} on {summary['world_size']} rank(s) of cpu, 32-true"
    formula = summary["state_bytes"]["formula"]
    trained = int(re.search(r"([\d,]+) trained", rows["model"])[1].replace(",", ""))
    assert formula["parameters"] == 4 * trained
    again = dry("--ckpt_path", "last")
    os.environ.pop(runs.FOUND, None)
    assert "of the last run of this name" in again["time"]
    assert again["start"] == "runs/x/version_0/checkpoints/last.ckpt"
    assert again["run folder"] == "runs/x/version_0"
    assert dry()["run folder"] == "runs/x/version_1"
    assert [path.name for path in Path("runs/x").iterdir()] == ["version_0"]


def test_several_ranks_and_a_mesh(dry):
    rows = dry("--trainer.strategy", "zero2", "--trainer.devices", "2", "--trainer.max_steps", "3")
    one = dry()
    assert rows["strategy"].startswith("ZeroStrategy on 2 rank(s)")
    assert rows["steps"] == "3"
    assert rows["parameters"] == one["parameters"]
    assert [float(each["gradients"].split()[0]) for each in (one, rows)] == pytest.approx(
        [float(one["parameters"].split()[0]), float(one["parameters"].split()[0]) / 2], rel=0.05
    )
    mesh = ["--trainer.strategy.class_path", "MeshStrategy", "--trainer.strategy.init_args.tp", "2"]
    rows = dry(*mesh, "--trainer.devices", "2")
    assert "tp 2" in rows["mesh"]
    assert rows["memory"].endswith("on the rank that needs most, predicted")
    activations, halved = (number_of_bytes(each["activations"]) for each in (one, rows))
    assert 0.4 * activations < halved < activations, "tp 2 splits the block's inner activations, and not its inputs"
    assert number_of_bytes(rows["optimizer"]) < number_of_bytes(one["optimizer"])
    rows = dry("--trainer.strategy", "deepspeed_2", "--trainer.devices", "2")
    assert rows["activations"].startswith("not predicted: ")


PLAIN = """
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader


class Net(BoringModel):
    pass


class ByHand(BoringModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch):
        raise AssertionError("a dry run takes no step")


class Short(BoringModel):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class Plain(LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        assert self.trainer is None or self.trainer.lightning_module is not None, "data may read the module"
        return DataLoader(RandomDataset(32, 26), batch_size=self.batch_size)
"""


def test_a_plain_loader_is_divided_among_ranks(dry):
    Path("plain.py").write_text(PLAIN)
    Path("x.yaml").write_text(
        "plugins: [./plain.py]\ntrainer: {max_epochs: 2, accelerator: cpu}\n"
        "model: {class_path: Net}\ndata: {class_path: Plain}\n"
    )
    rows = dry()
    assert (rows["data"], rows["steps"]) == ("Plain, 4 samples a batch", "14")
    rows = dry("--trainer.devices", "2", "--trainer.strategy", "zero2")
    assert (rows["data"], rows["steps"]) == ("Plain, 4 samples a batch, a rank: 8 over all 2", "8")
    rows = dry("--trainer.devices", "2", "--trainer.use_distributed_sampler", "false")
    assert rows["steps"] == "14"
    assert rows["activations"].endswith(" a rank, predicted")
    assert dry("--model", "Short")["activations"].endswith(" a rank, predicted"), "without the batch's number"
    rows = dry("--model", "ByHand")
    assert rows["steps"] == "those of ByHand's own, in 14 batches: it optimizes by hand"
    assert "got ByHand with automatic_optimization = False; measure a run" in rows["activations"]


def test_a_run_without_a_limit(dry):
    Path("plain.py").write_text(PLAIN)
    Path("x.yaml").write_text(
        "plugins: [./plain.py]\ntrainer: {accelerator: cpu}\nmodel: {class_path: Net}\ndata: {class_path: Plain}\n"
    )
    assert dry()["steps"] == "7,000: without max_epochs or max_steps Lightning trains 1,000 epochs"
    assert dry("--trainer.max_epochs", "-1")["steps"] == "without a limit"
    assert dry("--trainer.max_time", "00:00:01:00")["steps"] == "without a limit"


def number_of_bytes(text: str) -> float:
    number, unit = text.split()[:2]
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit.rstrip(",")]


def test_what_a_run_refuses_is_refused(dry, capsys):
    assert main(["fit", "--config", "x.yaml", "--dry-run", "--data.init_args.batch_size", "9999"]) == 2
    assert "batch_size" in capsys.readouterr().err
    assert main(["fit", "--config", "x.yaml", "--dry-run", "--ckpt_path", "none.ckpt"]) == 2
    assert "no checkpoint none.ckpt" in capsys.readouterr().err
    assert not Path("runs").exists()
