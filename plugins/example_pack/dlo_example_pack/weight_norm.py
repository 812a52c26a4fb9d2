"""The norm of the weights, part by part.

Weights that grow without end are an early sign of a learning rate that is too high, or of a part that weight decay
leaves out; a part whose norm does not move at all is not being trained.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from dlo_framework import DloError


def weight_norms(module: nn.Module, depth: int) -> dict[str, Tensor]:
    """Returns the L2 norms of a module's trainable parameters, all together and by part.

    Args:
        module: Any module. Sharded parameters (DTensor) are gathered, so each rank must call.
        depth: How many names deep parts are told apart: 1 has `encoder` and `head`, 2 `encoder.0`...; 0 none.

    Returns:
        A scalar for each part in the order of its first parameter, and last their norm, `total`.
    """
    squares: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        norm = torch.linalg.vector_norm(parameter.detach(), dtype=torch.float32)
        square = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2
        part = ".".join(name.split(".")[:-1][:depth]) or name
        squares[part] = squares[part] + square if part in squares else square
    total = torch.stack(list(squares.values())).sum() if squares else torch.zeros(())
    parts = squares if depth > 0 else {}
    return {**{part: square.sqrt() for part, square in parts.items()}, "total": total.sqrt()}


class WeightNormLogger(Callback):
    """Logs the L2 norm of the weights, as a whole and part by part.

    Args:
        every_n_steps: Optimizer steps between two logs; each costs one wait for the device.
        depth: How many names deep parts are told apart; 0 logs the whole model's norm alone.

    Raises:
        DloError: if `every_n_steps` is smaller than 1, or `depth` than 0.
    """

    def __init__(self, every_n_steps: int = 50, depth: int = 2) -> None:
        if every_n_steps < 1:
            raise DloError(f"every_n_steps must be at least 1, was {every_n_steps}; 1 logs each step")
        if depth < 0:
            raise DloError(f"depth must be at least 0, was {depth}; 0 logs the whole model's norm alone")
        self.every_n_steps = every_n_steps
        self.depth = depth
        self._logged_step = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs, if an optimizer step that is due ended with this batch."""
        step = trainer.global_step
        # With accumulation, several batches end at one step.
        if step % self.every_n_steps or step == self._logged_step:
            return
        self._logged_step = step
        norms = weight_norms(pl_module, self.depth)
        values = torch.stack(list(norms.values())).tolist()  # One wait, not one a part.
        metrics = {f"weight_norm/{name}": value for name, value in zip(norms, values, strict=True)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
