"""Where strategies have models built: without memory where that is asked for."""

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision

from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy


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
