"""Runs with the default callbacks of a net that draws random numbers in each step, so that a wrong resume shows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.checkpoint import SafeCheckpointIO
from dlo_framework.data import ResumableDataModule
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.run import runs
from dlo_framework.stop import RunStopped
from support.noisy_data import Noisy

SAMPLES, BATCH, EPOCHS = 52, 5, 3  # 10 batches an epoch, the last 2 samples of each order left out


class Data(ResumableDataModule):
    def __init__(self, workers: int = 0) -> None:
        super().__init__(batch_size=BATCH, num_workers=workers, seed=3)

    def train_dataloader(self) -> Any:
        return self.train_loader(Noisy(SAMPLES))

    def val_dataloader(self) -> Any:
        return self.eval_loader(Noisy(SAMPLES))


class Net(LightningModule):
    """Uses random numbers of torch (dropout), NumPy and Python in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        x = x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)  # A validation that draws must not shift the training.
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def last(folder: Path) -> Path:
    return folder / runs.CHECKPOINTS / runs.LAST


def run(
    folder: Path,
    *callbacks: Callback,
    resume: bool = False,
    data: Any = None,
    kind: type[Net] = Net,
    save_minutes: float = 10,
    **options: Any,
) -> tuple[list[float], RunStopped | None]:
    """Returns the losses of a fit, and the exception that ended it."""
    torch.manual_seed(99 if resume else 1)  # A resumed process starts from other random numbers.
    random.seed(98 if resume else 2)
    np.random.seed(97 if resume else 3)
    folder.mkdir(exist_ok=True)
    module = kind()
    fixed = {"run_folder": folder, "config": "{}", "progress_bar": False, "save_minutes": save_minutes}
    every = add_default_callbacks(list(callbacks), model=module, **fixed)
    quiet = {"logger": False, "enable_model_summary": False, "enable_progress_bar": False}
    options = {"max_epochs": EPOCHS, **quiet, **options}
    trainer = Trainer(accelerator="cpu", plugins=[SafeCheckpointIO()], callbacks=every, **options)
    use_canonical_checkpoints(trainer)  # As the command does.
    try:
        trainer.fit(module, datamodule=data or Data(), ckpt_path=last(folder) if resume else None)
    except RunStopped as stopped:
        return module.losses, stopped
    return module.losses, None
