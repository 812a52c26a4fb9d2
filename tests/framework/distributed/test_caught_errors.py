"""A script that catches the error of a run of several ranks can start the next run."""

import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.trainers import quiet_trainer


class Fails(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("no training")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _goes_on(rank: int, world_size: int) -> list[str]:
    trainer = quiet_trainer(devices=2, strategy=ZeroStrategy(1), max_steps=1, num_sanity_val_steps=0)
    module, data = Fails(), DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=2)
    found = []
    for _ in range(3):
        try:
            trainer.fit(module, data)
        except ValueError as error:
            found.append(str(error))
        found.extend(trainer.validate(module, data, verbose=False)[0])
    time.sleep(3)  # Longer than a rank waits for the end of callbacks.
    return found


def test_the_next_run_starts_at_once() -> None:
    """It ended the process where it began before the failed run's thread had looked at its event."""
    assert run_distributed(_goes_on, 2, backend=None) == [["no training", "val_loss"] * 3] * 2
