"""Where strategies build models: in CPU memory, for one seed's weights on each device, or without memory if asked."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import HalfPrecision

from dlo_framework.distributed.strategy import DataParallelStrategy, SingleProcessStrategy
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy

#: Not a device with values; it stands for an accelerator, whose random numbers are others than the CPU's.
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
