"""Callback that logs the norm of the weights, in total and per submodule.

Weights that keep growing are an early sign of a learning rate that is too high, or of a submodule that weight decay
leaves out; a submodule whose norm never changes is not trained.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlo_framework import DloError
from dlo_framework.callback import PluginCallback


def weight_norms(module: nn.Module, depth: int) -> dict[str, Tensor]:
    """Returns the L2 norms of a module's trainable parameters, in total and per submodule.

    Args:
        module: Module to measure. Sharded parameters (DTensor) are gathered, so each rank must call this.
        depth: Depth of the submodules: 1 has `encoder` and `head`, 2 `encoder.0`...; 0 only the total.

    Returns:
        Scalar for each submodule in the order of its first parameter, and last their norm, `total`.
    """
    squares: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        norm = torch.linalg.vector_norm(parameter.detach(), dtype=torch.float32)
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        part = ".".join(name.split(".")[:-1][:depth]) or name
        squares[part] = squares[part] + square if part in squares else square
    total = torch.stack(list(squares.values())).sum() if squares else torch.zeros(())
    parts = squares if depth > 0 else {}
    return {**{part: square.sqrt() for part, square in parts.items()}, "total": total.sqrt()}


class WeightNormLogger(PluginCallback):
    """Logs the L2 norm of the weights, in total and per submodule.

    Args:
        every_n_steps: Number of optimizer steps between two logs; each log waits once for the device.
        depth: Depth of the submodules that are logged; 0 logs only the total.

    Raises:
        DloError: If `every_n_steps` is smaller than 1, or `depth` than 0.
    """

    def __init__(self, every_n_steps: int = 50, depth: int = 2) -> None:
        if every_n_steps < 1:
            raise DloError(f"every_n_steps must be at least 1, got {every_n_steps}; 1 logs each step")
        if depth < 0:
            raise DloError(f"depth must be at least 0, got {depth}; 0 logs only the total")
        self.every_n_steps = every_n_steps
        self.depth = depth
        self._logged_step = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs if a due optimizer step ended with this batch."""
        step = trainer.global_step
        # With accumulation, several batches end at one step.
        if step % self.every_n_steps or step == self._logged_step:
            return
        self._logged_step = step
        norms = weight_norms(pl_module, self.depth)
        values = torch.stack(list(norms.values())).tolist()  # One wait, not one per submodule.
        metrics = {f"weight_norm/{name}": value for name, value in zip(norms, values, strict=True)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
