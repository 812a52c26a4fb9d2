"""What stands on which device, shown without an accelerator: by tensors without memory, and by what torch is asked."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torchmetrics.aggregation import SumMetric

from dlo_framework.distributed.norms import total_norm
from dlo_framework.distributed.precision import ShardedScaler, with_sharded_clipping
from dlo_framework.distributed.strategy import ShardedStrategy
from dlo_plugins.compression.ddp_hooks import average_tensors
from dlo_plugins.strategies.zero import ZeroStrategy


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_metrics_and_what_a_module_says_of_its_device_come_along(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = LightningModule()
    module.measures = nn.ModuleDict({"seen": SumMetric()})
    strategy = ZeroStrategy(stage=3)
    strategy._lightning_module = module
    monkeypatch.setattr(ShardedStrategy, "root_device", torch.device("meta"))
    strategy.move_metrics()
    assert module.device.type == module.measures["seen"].sum_value.device.type == "meta"


def test_no_gradient_has_a_norm_on_the_parameters_device() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2, device="meta"))], lr=0.1)
    assert total_norm(optimizer).device.type == "meta"


def test_tensors_elsewhere_are_averaged_over_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: reduced.append(tensor.device.type))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with FakeTensorMode():
        tensors = [torch.zeros(3, device="cuda"), torch.tensor(1.0), torch.zeros(2)]
        average_tensors(tensors, torch.device("cuda"))
        assert [tensor.device.type for tensor in tensors] == ["cuda", "cpu", "cpu"]
    assert reduced == ["cuda", "cuda"]


def test_the_scale_is_brought_to_gradients_in_cpu_memory_before_they_are_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, list[str]] = defaultdict(list)

    def unscale(self: Any, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> dict[Any, Any]:
        of = next(p.grad.device.type for group in optimizer.param_groups for p in group["params"])
        given[of] += [inv_scale.device.type, found_inf.device.type]
        return {}

    monkeypatch.setattr(ShardedGradScaler, "_unscale_grads_", unscale)
    with FakeTensorMode():
        scaler = ShardedScaler.__new__(ShardedScaler)
        for device in ("cpu", "cuda"):
            parameter = nn.Parameter(torch.zeros(2, device=device))
            parameter.grad = torch.zeros(2, device=device)
            scale, inf = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
            scaler._unscale_grads_(torch.optim.SGD([parameter], lr=0.1), scale, inf)
    assert given == {"cpu": ["cpu", "cpu"], "cuda": ["cuda", "cuda"]}


def test_a_loss_scale_of_ones_own_keeps_its_settings(one_rank) -> None:
    own = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
    plugin: Any = with_sharded_clipping(MixedPrecision("16-mixed", "cpu", own), total_norm)
    scaler, parameter = plugin.scaler, nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scales = []
    for factor in (1.0, 1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 24.0, 6.0, 6.0]
    assert parameter.tolist() == [-2.0, -2.0]
