"""Where strategies build models, and which dtypes they keep."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from dlo_framework.distributed.strategy import DataParallelStrategy, SingleProcessStrategy
from dlo_framework.task import Task
from dlo_framework.task_abilities import KeepsBuffers
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.trainers import quiet_trainer

#: Not a device with values; it acts as an accelerator, whose random numbers are others than the CPU's.
DEVICE = torch.device("meta")


@pytest.mark.parametrize(
    "make", [DataParallelStrategy, ZeroStrategy, FSDPStrategy, MeshStrategy, DeepSpeedBridge, None]
)
def test_a_model_is_built_in_cpu_memory_whatever_the_training_device(make) -> None:
    if make is None:
        strategy = SingleProcessStrategy(device=DEVICE)
    else:
        strategy = make()
        strategy.parallel_devices, strategy.cluster_environment = [DEVICE], LightningEnvironment()
    assert strategy.root_device == DEVICE
    with strategy.tensor_init_context():
        assert torch.nn.Linear(2, 2).weight.device.type == "cpu"


@pytest.mark.parametrize("make", [ZeroStrategy, FSDPStrategy, MeshStrategy])
def test_a_model_is_built_without_memory_where_that_is_asked_for(make: Any) -> None:
    for meta_init, empty_init, expected in (
        (True, None, "meta"),
        (False, None, "cpu"),
        (False, True, "meta"),
        (True, False, "cpu"),
    ):
        strategy = make(meta_init=meta_init)
        strategy.parallel_devices = [torch.device("cpu")]
        strategy.precision_plugin = HalfPrecision("bf16-true")
        with strategy.tensor_init_context(empty_init):
            weight = torch.nn.Linear(2, 2).weight
        assert weight.device.type == expected, (meta_init, empty_init)
        assert weight.dtype == torch.bfloat16


# sums of metrics and buffers that a task names keep their dtype under each strategy, whatever the precision


FREQUENCY = 0.31415926
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


class Turned(nn.Linear):
    """A layer with a frequency that bf16 does not hold."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("frequency", torch.tensor([FREQUENCY], dtype=torch.float32), persistent=False)
        self.register_buffer("other", torch.tensor([1.0]), persistent=False)


class Counting(Task, KeepsBuffers):
    """Adds 1 three hundred times, in ten batches: in bf16 the sum stays at 256."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.mean = SumMetric(), MeanMetric()
        self.inside = nn.ModuleDict({"mean": MeanMetric()})
        self.inside["mean"].update(3.0)  # before the run

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = Turned()

    def full_precision_buffers(self) -> list[str]:
        return ["model.frequency"]

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch[0],), {}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            assert self.inside["mean"].compute().item() == 3.0
        for number in range(30):
            self.total.update(1.0)
            self.mean.update(float((30 * batch_idx + number) % 128))
        self.log_dict({"total": self.total, "mean": self.mean})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_metrics_and_the_buffers_that_a_task_names_keep_their_dtype_under_bf16_true(name: str) -> None:
    strategy: Strategy = STRATEGIES[name]()
    data = DataLoader(TensorDataset(torch.randn(10, 4)), batch_size=1)
    options = {"max_steps": 2, "num_sanity_val_steps": 0, "val_check_interval": 2, "precision": "bf16-true"}
    trainer = quiet_trainer(devices=1, strategy=strategy, **options)
    module = Counting()
    trainer.fit(module, data, data)
    assert trainer.callback_metrics["total"].item() == 300
    assert trainer.callback_metrics["mean"].item() == pytest.approx(sum(i % 128 for i in range(300)) / 300, rel=1e-6)
    assert module.model.get_buffer("frequency").tolist() == torch.tensor([FREQUENCY]).tolist()
    assert module.model.get_buffer("other").dtype == torch.bfloat16
    assert module.total.sum_value.dtype == module.inside["mean"].mean_value.dtype == torch.float32
