"""Run folders and runs that are resumed through the command: names, configs, curves, and weights without memory."""

import json
import os
import shutil
import signal
from pathlib import Path

import lightning.pytorch  # noqa: F401  Its log handler keeps the stream it is imported with: not a test's.
import pytest
import yaml

from dlo_framework.cli.main import main
from dlo_framework.run import runs
from support.digits_config import digits_config

CONFIG = """
plugins: [support.user_net]
model: {class_path: Net}
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
"""


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Returns a function that runs ``dlo fit`` in this process and returns the run's files by name."""
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(CONFIG)

    def run(*words: str, config: str = "x.yaml", name: str = "x", version: int = 0) -> set[str]:
        assert main(["fit", "--config", config, *words]) == 0
        return {path.name for path in Path("runs", name, f"version_{version}").iterdir()}

    return run


def saved(version: int, name: str = "x", file: str = "config.yaml") -> dict:
    return yaml.safe_load(Path("runs", name, f"version_{version}", file).read_text())


def summary(version: int) -> dict:
    return json.loads(Path("runs", "x", f"version_{version}", "summary.json").read_text())


def test_two_runs_in_one_process_are_two(fit):
    for version in range(2):
        files = fit("--trainer.max_epochs", str(version + 1), version=version)
        assert not [name for name in files if "resumed" in name]
        assert summary(version)["steps"] == 4 * (version + 1)
    assert "summary.json" in fit("--run.name", "other", name="other")
    fit("--ckpt_path", "last", "--trainer.max_epochs", "4", version=1)
    assert summary(1)["steps"] == 16
    fit("--ckpt_path", "auto", version=2)
    assert summary(2)["steps"] == 4, "the newest has finished: another begins"


def test_names_with_folders_several_configs_and_a_runs_own_config(fit, capfd):
    Path("y.yaml").write_text("trainer: {max_epochs: 2}\n")
    fit("--config", "y.yaml", "--run.name", "a/b", name="a/b")
    assert saved(0, "a/b")["run"]["name"] == "a/b"
    fit("--config", "y.yaml")
    assert summary(0)["steps"] == 8, "named after the first config"
    fit(version=1)
    for word in ("best", "last"):  # Those of the run whose config it is, not the newest run's.
        config = ["--config", "runs/x/version_0/config.yaml", "--ckpt_path", word]
        assert main(["fit", *config, "--dry-run"]) == 0
        assert "start          runs/x/version_0/checkpoints/" in capfd.readouterr().out
        os.environ.pop(runs.FOUND, None)
    shutil.rmtree("runs/x/version_0/checkpoints")
    assert main(["validate", *config]) == 2
    assert "--ckpt_path last: runs/x/version_0 has no last checkpoint; train" in capfd.readouterr().err
    assert main(["fit", "--config", "x.yaml", "--run.name", "../a"]) == 2
    assert "run.name must be a name below run.dir, got ../a; set run.dir" in capfd.readouterr().err


def test_ones_own_checkpoints_are_gone_on_with(fit):
    own = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 2, "save_last": True}}
    trainer = {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "curves"}}, "callbacks": [own]}
    config = yaml.safe_load(CONFIG)
    Path("x.yaml").write_text(yaml.safe_dump({**config, "trainer": {**config["trainer"], **trainer}}))
    fit()
    fit("--ckpt_path", "last", "--trainer.max_epochs", "2")
    assert (summary(0)["steps"], summary(0)["resumptions"]) == (8, 1)


def test_the_saved_config_is_the_run_again(fit):
    """Also what was set to null against a default that is not."""
    words = ["--model.init_args.dropout", "null", "--trainer.check_val_every_n_epoch", "null"]
    fit(*words, "--trainer.val_check_interval", "4")
    first = saved(0)
    assert first["model"]["init_args"] == {"dropout": None, "width": None}
    assert first["trainer"]["check_val_every_n_epoch"] is None
    fit(config="runs/x/version_0/config.yaml", version=1)
    assert saved(1) == first
    hyperparameters = saved(1, file="hparams.yaml")
    assert hyperparameters["trainer.val_check_interval"] == 4
    assert hyperparameters["dropout"] is None, "the model's own"
    assert [name for name, value in hyperparameters.items() if value is None] == ["dropout", "width"]


def test_a_resumption_that_changes_nothing_leaves_no_config(fit):
    fit()
    assert "ckpt_path" not in saved(0)
    assert "config.resumed-1.yaml" not in fit("--ckpt_path", "runs/x/version_0/checkpoints/last.ckpt")
    assert "config.resumed-1.yaml" in fit("--ckpt_path", "last", "--trainer.max_epochs", "2")
    assert saved(0, file="config.resumed-1.yaml")["trainer"]["max_epochs"] == 2


# stopping and resuming through the command: the curve of a run that was interrupted is that of one that was not


PLAIN = ["--config", "small.yaml"]
TRAINER = "max_epochs: 4, limit_train_batches: 22, limit_val_batches: 2, log_every_n_steps: 2, accelerator: cpu"
INTERRUPTED = digits_config(
    f"{TRAINER}, accumulate_grad_batches: 3",
    "patch_size: 4, embed_dim: 48, depth: 2, num_heads: 2, drop_path_rate: 0.2",
    "image_size: 16, batch_size: 32",
    "ema_decay: 0.9",
)


@pytest.mark.slow
def test_a_run_and_one_that_is_interrupted_have_one_curve(dlo, curve):
    """And two runs with one seed: the interrupted one begins as a run of its own."""
    (dlo.folder / "small.yaml").write_text(INTERRUPTED)
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


# --- A model that only a checkpoint can fill is built on the meta device and resumed, where state is sharded ---------


PLUGIN = '''
import torch
from lightning.pytorch import LightningModule
from torch import nn


class Table(nn.Module):
    """Has values that no `reset_parameters` draws."""

    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.linspace(0, 1, 12).reshape(4, 3))

    def forward(self, rows):
        return rows @ self.values


class Fit(LightningModule):
    """Fits a table."""

    def configure_model(self):
        if not hasattr(self, "table"):
            self.table = Table()
            print("BUILT ON", self.table.values.device.type)

    def training_step(self, batch, batch_idx):
        loss = self.table(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.eye(4).repeat(2, 1), batch_size=4)
'''
WITHOUT_MEMORY = """
plugins: [./table.py]
trainer: {max_epochs: 2, accelerator: cpu, devices: 1, logger: false, enable_progress_bar: false}
model: {class_path: Fit}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.py").write_text(PLUGIN)
    (tmp_path / "run.yaml").write_text(WITHOUT_MEMORY)
    assert main(["fit", "--config", "run.yaml"]) == 0
    return tmp_path


def last_loss(folder: Path) -> float:
    return json.loads((folder / "runs/run/version_0/summary.json").read_text())["metrics"]["loss"]


@pytest.mark.parametrize(
    "strategy",
    [
        "ZeroStrategy, init_args: {stage: 3, meta_init: true}",
        pytest.param("FSDPStrategy, init_args: {meta_init: true}", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_takes_the_values_of_its_checkpoint(folder: Path, strategy: str, capfd) -> None:
    sharded = ["--trainer.strategy", f"{{class_path: {strategy}}}", "--trainer.max_epochs", "3"]
    before = last_loss(folder)
    assert main(["fit", "--config", "run.yaml", "--run.name", "new", *sharded]) == 2
    assert "tensors under meta_init must have a reset_parameters()" in capfd.readouterr().err
    assert main(["fit", "--config", "run.yaml", *sharded, "--ckpt_path", "last"]) == 0
    assert "BUILT ON meta" in capfd.readouterr().out
    assert 0 < last_loss(folder) < before
