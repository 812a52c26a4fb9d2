"""Tests distributed code: a collective, and parity of training with one process."""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.testing import Case, assert_parity, run_distributed


def mean_over_ranks(value: Tensor) -> Tensor:
    """Returns the mean of a value over all ranks."""
    dist.all_reduce(value)
    return value / dist.get_world_size()


def _on_each_rank(rank: int, world_size: int, offset: float) -> float:
    return float(mean_over_ranks(torch.tensor(rank + offset)))


def test_mean() -> None:
    """All ranks return the mean."""
    assert run_distributed(_on_each_rank, 2, 0.5) == [1.0, 1.0]


class Regression(LightningModule):
    """Small regression model."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the mean loss of the batch, which strategies average over ranks."""
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


def build(momentum: float = 0.0) -> tuple[LightningModule, DataLoader]:
    """Returns a new model and its data, for each rank and for the single process."""
    x = torch.linspace(-1, 1, 160).view(40, 4)
    return Regression(momentum), DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=5)


def test_parity() -> None:
    """DDP equals one process, also with momentum and accumulated gradients."""
    accumulated = Case("ddp", arguments={"momentum": 0.9}, trainer={"accumulate_grad_batches": 2})
    assert_parity(build, ["ddp", accumulated], world_size=2, steps=8)
