"""Dropout under a mesh: other masks than one process draws, and the same training on the whole."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from dlo_framework import ParallelPlan, Task
from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.testing import run_distributed
from dlo_framework.watch.monitor import batch_loss
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

STEPS, LAST, SEEDS, RATE = 60, 20, 8, 0.5
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "pp": {"pp": 2, "micro_batches": 2},
    "dp_shard": {"dp_shard": 2},
}


class Layer(nn.Module):
    """Drops hidden features, which the ranks of tp share, and outputs, which all of them have."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.inner, self.outer = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(nn.functional.gelu(self.up(self.norm(x))))))


class Digits(Task):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def configure_model(self) -> None:
        if not self.has_model:
            blocks = [Layer(self.rate) for _ in range(4)]
            self.model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 64), *blocks, nn.Linear(64, 10))

    def parallel_plan(self) -> ParallelPlan:
        rules = {"*.norm": "sequence", "*.up": "column", "*.down": "row"}
        return ParallelPlan(blocks=("[2-5]",), stem=("0", "1"), head=("6",), tensor=rules)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = batch_loss(trainer, outputs)
        assert loss is not None
        self.found.append(float(trainer.strategy.reduce(loss.detach(), reduce_op="mean")))


def _last_loss(strategy: Any, world_size: int, seed: int, rate: float) -> float:
    """Returns the mean training loss of the last steps; weights and order of the data are the seed's."""
    seed_everything(seed, workers=True, verbose=False)
    task = Digits(rate)
    losses = Losses()
    trainer = quiet_trainer(
        devices=world_size,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[losses],
        limit_val_batches=0,
    )
    trainer.fit(task, datamodule=DigitsData(image_size=16, batch_size=32))
    return sum(losses.found[-LAST:]) / LAST


def _runs(rank: int, world_size: int, meshes: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    register_data_parallel()
    make = {name: partial(MeshStrategy, **axes) for name, axes in meshes.items()} or {"alone": lambda: "auto"}
    found = {
        name: [_last_loss(strategy(), world_size, seed, RATE) for seed in range(SEEDS)]
        for name, strategy in make.items()
    }
    if not meshes:
        found["none"] = [_last_loss("auto", world_size, seed, 0.0) for seed in range(SEEDS)]
    return found


def _gap(one: list[float], other: list[float]) -> tuple[float, float]:
    """Returns the mean of the pairs' differences (they share weights and data), and its standard error."""
    apart = torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
    return float(apart.mean()), float(apart.std() / math.sqrt(len(apart)))


@pytest.mark.slow
def test_dropout_trains_on_the_whole_as_in_one_process() -> None:
    (alone,) = run_distributed(_runs, 1, {}, backend=None, timeout=1800)
    ranks = run_distributed(_runs, 2, MESHES, backend=None, timeout=1800)[0]
    without, error = _gap(alone["none"], alone["alone"])
    assert -without > 5 * error  # Dropout has an effect that can be seen.
    for name, losses in ranks.items():
        assert losses != alone["alone"], name
        gap, error = _gap(losses, alone["alone"])
        assert abs(gap) < 3 * error, (name, gap, error)
        assert error < 0.25 * -without, name  # So that the mean of them tells the two apart.
