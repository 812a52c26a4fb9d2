"""Saves the weights to which lottery tickets are rewound, and the names of those that are pruned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from dlo_framework.atomic_file import write_atomic
from dlo_framework.errors import DloError
from dlo_framework.progress import check_end
from dlo_plugins.callbacks.gradients import last_linear
from dlo_plugins.mesh.mesh_description import prepare_model
from dlo_plugins.pruning.layers import select_layers

#: Files in the folder of the rounds.
START, LAYERS = "start.ckpt", "layers.json"


class TicketStart(Callback):
    """Saves a run's state at a step, from which each round of `dlo ticket` trains its masked weights.

    `dlo ticket` adds it to the first round; see Frankle et al. 2020, arXiv 1912.05671.

    Args:
        folder: Folder for `start.ckpt` and `layers.json`.
        step: Number of optimizer steps before the state is saved; 0 for the initial weights.
        skip: Patterns of layers that stay dense; None skips the output layer.

    Raises:
        DloError: If `step` is negative or not before the run's end, or a pattern matches nothing.
    """

    #: Why `dlo parity` trains without it.
    left_out_of_parity = "it saves a checkpoint, and changes nothing"

    def __init__(self, folder: str, step: int = 0, skip: list[str] | None = None) -> None:
        if step < 0:
            raise DloError(f"ticket: --rewind must be at least 0 steps, got {step}; 0 is the initial weights")
        self.folder, self.step, self.skip = Path(folder), step, skip
        self._saved_at = -1

    def check_run(
        self, trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None = None
    ) -> None:
        """Checks the step and the patterns, before any process starts.

        Raises:
            DloError: If they do not fit the run or the model.
        """
        check_end(trainer)
        if 0 <= trainer.max_steps <= self.step:
            raise DloError(
                f"ticket: --rewind must be before the run's last step {trainer.max_steps}, got {self.step}; use"
                f" {trainer.max_steps // 10}"
            )
        built, _ = prepare_model(module)
        select_layers(built, self.skip, last_linear(built) if isinstance(built, LightningModule) else None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the names of the layers, and saves the initial state if it is the one to rewind to."""
        if trainer.is_global_zero:
            layers = select_layers(pl_module, self.skip, last_linear(pl_module))
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / LAYERS, json.dumps([layer.name for layer in layers], indent=1) + "\n")
        self._save_at(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves the state at the step."""
        self._save_at(trainer)

    def _save_at(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step and self._saved_at != self.step:
            self._saved_at = self.step
            trainer.save_checkpoint(self.folder / START)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that the run has reached the step.

        Raises:
            DloError: If it ended before.
        """
        if trainer.global_step < self.step:
            raise DloError(
                f"ticket: --rewind must be before the run's end, got step {self.step} in a run of"
                f" {trainer.global_step} steps; use {max(0, trainer.global_step // 10)}"
            )
