"""Every strategy builds models in CPU memory: a seed gives the same initial weights under each, on each device."""

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment

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
