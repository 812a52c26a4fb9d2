"""The table of memory has the state of the run's own optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_framework import Task
from dlo_framework.data import ResumableDataModule
from dlo_plugins.profile.model_report import memory_table

CONFIG: dict[str, Any] = {"trainer": {"accelerator": "cpu"}, "data": {"init_args": {"batch_size": 8}}}


class Classes(Task):
    def __init__(self, optimizer: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__()
        self.optimizer, self.options = optimizer, options

    def configure_model(self) -> None:
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=0.1, **self.options)  # type: ignore[call-arg]


class Rows(ResumableDataModule):
    def train_dataloader(self) -> Any:
        return self.train_loader(torch.utils.data.TensorDataset(torch.zeros(64, 16), torch.zeros(64, dtype=torch.long)))


@pytest.mark.parametrize(
    ("optimizer", "options", "moments"),
    [(torch.optim.SGD, {}, 0), (torch.optim.SGD, {"momentum": 0.9}, 1), (torch.optim.AdamW, {}, 2)],
)
def test_the_optimizer_s_state_is_that_of_the_run(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], moments: int
) -> None:
    table = memory_table(CONFIG, Classes(optimizer, **options), Rows(batch_size=8), [8, 16], None)
    for memory in table.memory[None].values():
        assert memory.parameters > 0
        assert memory.optimizer == pytest.approx(moments * memory.parameters, rel=0.01)
