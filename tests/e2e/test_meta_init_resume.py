"""A model that only a checkpoint can fill is built on the meta device and resumed, where state is sharded."""

import json
from pathlib import Path

import pytest

from dlo_framework.cli.main import main

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
CONFIG = """
plugins: [./table.py]
trainer: {max_epochs: 2, accelerator: cpu, devices: 1, logger: false, enable_progress_bar: false}
model: {class_path: Fit}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.py").write_text(PLUGIN)
    (tmp_path / "run.yaml").write_text(CONFIG)
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
