"""Gradient accumulation with a correct mean in an epoch's last window, which may be shorter than the others."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from dlo_framework.progress import AccumulationWindow


class AccumulationTail(Callback):
    """Makes the last gradient of an epoch the mean over its own batches; on by default.

    Lightning (2.6) divides each loss by ``accumulate_grad_batches``, also if the epoch ends in the middle of a window:
    with 10 batches and 4 of them to a step, the last gradient is half of what it should be. Here the divisor is the
    window's real length. Each batch of a window has the same weight, however many samples it has. The callback must
    precede callbacks that change gradients, as in every ``dlo fit``: if the loader has no length, it scales the last
    gradient up.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(self) -> None:
        self._size = 1
        self._window: AccumulationWindow | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Sets Lightning's window length to that of the batch's window."""
        set_by = trainer.accumulate_grad_batches
        if set_by is not self._window:
            if isinstance(set_by, AccumulationWindow):
                return  # Another callback plans the windows: DynamicBatchSize.
            self._size = set_by
        start, length = find_window(batch_idx, self._size, trainer.num_training_batches)
        if length == self._size:
            trainer.accumulate_grad_batches, self._window = self._size, None
        elif self._window is None or self._window.start != start:
            trainer.accumulate_grad_batches = self._window = AccumulationWindow(length, start, self._size)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Scales up the gradient of a last window that turns out short, because the loader has no length."""
        size = trainer.accumulate_grad_batches
        if isinstance(size, AccumulationWindow) or size == 1 or not pl_module.automatic_optimization:
            return
        batches = (trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1) % size + 1
        if batches < size:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if gradients:  # None where StochasticWeightAveraging (Lightning 2.6) renews statistics in a last pass.
                torch._foreach_mul_(gradients, size / batches)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the number that the user set."""
        self._release(trainer)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the number after an exception in an earlier fit."""
        self._release(trainer)

    def _release(self, trainer: Trainer) -> None:
        if self._window is not None and trainer.accumulate_grad_batches is self._window:
            trainer.accumulate_grad_batches = self._size
        self._window = None


def find_window(batch: int, size: int, batches: float) -> tuple[int, int]:
    """Returns the accumulation window of a batch: its first batch, and its number of batches.

    Args:
        batch: Index of the batch in the epoch, from 0.
        size: Number of batches in all windows but the last.
        batches: Number of batches in the epoch; infinity if unknown.
    """
    start = batch - batch % size
    return start, size if math.isinf(batches) else min(size, int(batches) - start)
