"""A user's task on one and two ranks: nine validation samples, losses that know nothing of padding."""

import json
from pathlib import Path

import pytest

MODULE = """
import torch
from torch.nn import functional as F
from dlo_framework import Task
from dlo_framework.data import ResumableDataModule

class Net(Task):
    best_metric = ("val_loss", "min")
    def configure_model(self):
        if not self.has_model:
            self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    def loss(self, outputs, batch):
        shares, classes = batch[1]
        return F.mse_loss(outputs[:, 0], shares) + F.cross_entropy(outputs[:, 1:], classes)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class Data(ResumableDataModule):
    def __init__(self):
        super().__init__(batch_size=4, num_workers=0)
    def samples(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 4, generator=generator)
        return [(x[i], (10 * x[i].sum(), torch.tensor(i % 3))) for i in range(count)]
    def train_dataloader(self):
        return self.train_loader(self.samples(16, 0))
    def val_dataloader(self):
        return self.eval_loader(self.samples(9, 1))
"""
CONFIG = """
plugins: [./own.py]
seed_everything: 3
model: {class_path: Net}
data: {class_path: Data}
trainer:
  max_epochs: 2
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
"""


def test_the_validation_loss_and_the_best_checkpoint_are_the_same_on_two_ranks(dlo, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "x.yaml").write_text(CONFIG)
    metrics, best = [], []
    for devices in ("1", "2"):
        words = ["fit", "--config", "x.yaml", "--trainer.devices", devices, "--run.name", f"on{devices}"]
        dlo(*words)
        folder = tmp_path / "runs" / f"on{devices}" / "version_0"
        metrics.append(json.loads((folder / "summary.json").read_text())["metrics"]["val_loss"])
        best.append(sorted(path.name for path in (folder / "checkpoints").glob("epoch=*")))
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)
    assert best[0] == best[1]
    assert best[0]
