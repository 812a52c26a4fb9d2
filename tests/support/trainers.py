"""What most tests train with: a trainer that prints, logs and saves nothing, and a module around any net."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

#: Options of a run on a CPU that prints, logs and saves nothing.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet_trainer(**options: Any) -> Trainer:
    """Returns a trainer on a CPU that prints, logs and saves nothing, but for what the options say."""
    return Trainer(**QUIET | options)


class Squares(LightningModule):
    """Brings a net's outputs to zero by plain SGD.

    Args:
        layers: Layers of the net.
        lr: Learning rate.
    """

    def __init__(self, *layers: nn.Module, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.lr = nn.Sequential(*layers), lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)
