"""What tests note of a run: its losses, and checkpoints on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Watch(Callback):
    """Records each batch's loss, the mean over ranks with other samples, and saves a checkpoint on the way.

    Args:
        path: Checkpoint; None for none.
        step: Number of optimizer steps after which it is saved.
        batch: Number of batches of the run after which it is saved, in place of steps.
        stops: Whether the run ends there.

    Attributes:
        losses: Losses so far.
    """

    def __init__(
        self, path: Path | None = None, step: int | None = None, batch: int | None = None, stops: bool = False
    ) -> None:
        self.path, self.step, self.batch, self.stops = path, step, batch, stops
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        if outputs and "loss" in outputs:
            self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))
        done = (trainer.global_step, trainer.fit_loop.total_batch_idx + 1)
        if self.path is not None and done[self.batch is not None] == (self.batch or self.step):
            trainer.save_checkpoint(self.path)
            trainer.should_stop = trainer.should_stop or self.stops
