"""Metrics are summed in their own dtype under each strategy, whatever the precision of the model."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from dlo_framework.distributed.strategy import DataParallelStrategy, SingleProcessStrategy
from dlo_plugins.strategies.deepspeed import DeepSpeedBridge
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_plugins.strategies.zero import ZeroStrategy

STRATEGIES: dict[str, Any] = {
    "auto": SingleProcessStrategy,
    "ddp": DataParallelStrategy,
    "zero1": lambda: ZeroStrategy(stage=1),
    "zero3": lambda: ZeroStrategy(stage=3),
    "fsdp": FSDPStrategy,
    "mesh": MeshStrategy,
    "deepspeed_2": lambda: DeepSpeedBridge(stage=2),
    "deepspeed_3": lambda: DeepSpeedBridge(stage=3),
}


class Counting(LightningModule):
    """Adds 1 for each of 1,000 batches: in bf16 the sum stays at 256."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.total, self.mean = SumMetric(), MeanMetric()
        self.inside = nn.ModuleDict({"mean": MeanMetric()})
        self.inside["mean"].update(3.0)  # before the run

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            assert self.inside["mean"].compute().item() == 3.0
        self.total.update(1.0)
        self.mean.update(float(batch_idx % 128))
        self.log_dict({"total": self.total, "mean": self.mean})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_metrics_sums_keep_their_dtype_under_bf16_true(name: str) -> None:
    strategy: Strategy = STRATEGIES[name]()
    data = DataLoader(TensorDataset(torch.randn(1000, 4)), batch_size=1)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_steps": 2, "num_sanity_val_steps": 0, **off},
        strategy=strategy,
        precision="bf16-true",
        val_check_interval=2,
    )
    module = Counting()
    trainer.fit(module, data, data)
    assert trainer.callback_metrics["total"].item() == 1000
    assert trainer.callback_metrics["mean"].item() == pytest.approx(sum(i % 128 for i in range(1000)) / 1000, rel=1e-6)
    assert module.total.sum_value.dtype == module.inside["mean"].mean_value.dtype == torch.float32
