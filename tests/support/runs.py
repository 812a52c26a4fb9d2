"""Short runs: what tests note of them, and runs with dlo's default callbacks that are stopped, crashed and resumed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.checkpoint import SafeCheckpointIO
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.stop import RunStopped
from support.trainers import quiet_trainer


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


class Losses(Callback):
    """Keeps this rank's loss of each batch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))


class StopAt(Callback):
    """Stops a run at a batch: with a checkpoint there, or by a crash, which leaves that of the last validation.

    Args:
        batch: Number of the batch, from 1.
        crash: Whether the run crashes.
    """

    def __init__(self, batch: int, crash: bool = False) -> None:
        self.batch, self.crash, self.seen = batch, crash, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen += 1
        if self.seen == self.batch:
            if self.crash:
                raise RuntimeError("crash")
            signal.raise_signal(signal.SIGINT)


def fit_with_defaults(
    folder: Path, module: Any, data: Any, callbacks: Sequence[Callback], *, resume: bool = False, **options: Any
) -> Trainer:
    """Trains with the default callbacks until the end or until a :class:`StopAt`; returns the trainer.

    Args:
        folder: Run folder.
        module: Module to train.
        data: Datamodule.
        callbacks: Further callbacks.
        resume: Whether the run goes on from the folder's last checkpoint.
        options: Options of the trainer.
    """
    folder.mkdir(exist_ok=True)
    callbacks = add_default_callbacks(list(callbacks), run_folder=folder, model=module, config="{}", progress_bar=False)
    options = {"enable_checkpointing": True, "plugins": [SafeCheckpointIO()], **options}
    trainer = quiet_trainer(callbacks=callbacks, **options)
    crashes = any(isinstance(callback, StopAt) and callback.crash for callback in callbacks)
    with contextlib.suppress(RunStopped, *([RuntimeError] if crashes else [])):
        trainer.fit(module, datamodule=data, ckpt_path=folder / "checkpoints" / "last.ckpt" if resume else None)
    return trainer
