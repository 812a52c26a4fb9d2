"""Devices of tensors, shown without an accelerator: by tensors without memory, and by what torch is asked."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Shard
from torchmetrics.aggregation import SumMetric

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.precision import ShardedScaler, with_sharded_clipping
from dlo_framework.distributed.strategy import BackwardBuckets, ShardedStrategy
from dlo_framework.errors import DloError
from dlo_framework.norms import total_norm
from dlo_framework.run_setup import check_ranks, fill_ranks
from dlo_framework.strategy_contract import contract_of
from dlo_plugins.compression.ddp_hooks import average_tensors
from dlo_plugins.parallel.context.shared_attention import Ring
from dlo_plugins.parallel.fsdp.row_shards import RowGroup
from dlo_plugins.parallel.optimizer_shards import FullTensorShard
from dlo_plugins.parallel.zero.strategy import ZeroStrategy


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


def test_no_gradient_has_a_norm_on_the_device() -> None:
    assert total_norm([], torch.device("meta")).device.type == "meta"


def test_tensors_elsewhere_are_averaged_over_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: reduced.append(tensor.device.type))
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
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
        return {found_inf.device: found_inf}

    monkeypatch.setattr(ShardedGradScaler, "_unscale_grads_", unscale)
    with FakeTensorMode():
        scaler = ShardedScaler.__new__(ShardedScaler)
        for device in ("cpu", "cuda"):
            parameter = nn.Parameter(torch.zeros(2, device=device))
            parameter.grad = torch.zeros(2, device=device)
            scale, inf = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
            scaler._unscale_grads_(torch.optim.SGD([parameter], lr=0.1), scale, inf)
    assert given == {"cpu": ["cpu", "cpu"], "cuda": ["cuda", "cuda"]}


def test_gradients_of_several_devices_have_one_flag_that_ranks_sum_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with a scalar on the device, beside offloaded gradients, reduces as often as one without."""
    devices = torch.device("cpu"), torch.device("cuda", 0)
    flags = {device: torch.tensor([float(number)]) for number, device in enumerate(devices)}
    monkeypatch.setattr(ShardedGradScaler, "_unscale_grads_", lambda *_: flags)
    scaler = ShardedScaler.__new__(ShardedScaler)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    found = scaler._unscale_grads_(optimizer, torch.ones(1), torch.zeros(1))
    assert {device.type: flag.tolist() for device, flag in found.items()} == {"cpu": [1.0]}


def test_averaged_buckets_have_the_parameters_strides(one_rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused optimizers on CUDA require that parameter, gradient and moments have equal strides."""
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    image = torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    net(image).sum().backward()
    expected, seen = [p.grad.clone() for p in net.parameters() if p.grad is not None], []
    net.zero_grad()
    monkeypatch.setattr(dist, "all_reduce", lambda flat: flat.mul_(2))  # As of two ranks with the same batch.
    buckets = BackwardBuckets(net, lambda bucket: seen.extend(bucket), 2)
    buckets.begin()
    net(image).sum().backward()
    buckets.finish()
    assert len(seen) == 2
    assert net.weight.stride() != torch.empty(net.weight.shape).stride()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        torch.testing.assert_close(parameter.grad, gradient)


def test_gradients_of_a_checkpoint_have_the_parameters_strides() -> None:
    module, strategy = LightningModule(), SingleDeviceStrategy()
    module.net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strategy._lightning_module = module
    saved = {name: torch.randn(p.shape) for name, p in module.named_parameters()}
    contract_of(strategy).restore_gradients(saved)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, saved[name])


def test_full_tensors_are_where_they_are_stepped_before_a_checkpoint_is_loaded(one_rank) -> None:
    """torch moves loaded state to the parameter's device, where it meets the gradient of an offloaded step."""
    weight = nn.Parameter(torch.zeros(4, 3))
    computes, steps = torch.device("meta"), torch.device("cpu")
    group: Any = SimpleNamespace(
        names=["weight"], parameters=[weight], dtype=weight.dtype, device=computes, step_device=steps
    )
    share: Any = FullTensorShard([group], Communicator())
    optimizer = torch.optim.Adafactor([weight], lr=0.1)
    share.replace_params(optimizer, {id(weight): "weight"})
    state = {0: {"step": torch.tensor(3.0), "row_var": torch.ones(4, 1), "col_var": torch.ones(1, 3)}}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    (loaded,) = optimizer.state.values()
    assert loaded["row_var"].device == steps


def test_scalars_that_stay_on_the_device_are_joined_with_offloaded_rows(one_rank) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with FakeTensorMode():
        named: dict[str, Any] = {
            "scale": nn.Parameter(torch.zeros((), device="cuda")),
            "weight": nn.Parameter(DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(0)], run_check=False)),
        }
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter)
        group = RowGroup(named, Communicator(), torch.device("cuda", 0))
        assert group.step_device == group.shard.device == torch.device("cpu")
        assert group.gradient is not None
        assert group.gradient.device == torch.device("cpu")
        assert group.shard.numel() == group.gradient.numel() == 9


def test_the_host_does_not_wait_for_transfers_of_a_ring_on_nccl(monkeypatch: pytest.MonkeyPatch, one_rank) -> None:
    """NCCL's `wait` with a time limit blocks the host, and a group may have gloo for CPU tensors too."""
    ring = Ring(None)
    assert ring.limit(torch.device("cuda", 0)) == ring.limit(torch.device("cpu")) is not None
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "cpu:gloo,cuda:nccl")
    ring = Ring(None)
    assert ring.limit(torch.device("cuda", 0)) is None
    assert ring.limit(torch.device("cpu")) is not None


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


@pytest.mark.parametrize(
    ("launcher", "variables", "uneven", "message"),
    [
        ("torchrun", "TORCHELASTIC_RUN_ID=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4", "WORLD_SIZE=7", "got 7 in all and 4 on"),
        ("SLURM", "SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4 SLURM_STEP_ID=0", "SLURM_NTASKS_PER_NODE=", "got --ntasks 8"),
    ],
)
def test_processes_of_a_launcher_are_the_ranks_of_one_run(monkeypatch, launcher, variables, uneven, message):
    for name, value in (variable.split("=") for variable in variables.split()):
        monkeypatch.setenv(name, value)
    options = {"devices": "auto", "num_nodes": 1}
    fill_ranks(options)
    assert options == {"devices": 4, "num_nodes": 2}
    fixed = {"devices": 2, "num_nodes": 1}
    fill_ranks(fixed)
    assert fixed == {"devices": 2, "num_nodes": 1}
    with pytest.raises(DloError, match=rf"must be the 8 processes that {launcher} .* got 1 x 1; set --trainer.devices"):
        check_ranks(SingleDeviceStrategy("cpu"), {"devices": 1})
    name, value = uneven.split("=")
    monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(DloError, match=message):
        fill_ranks({"devices": "auto"})
    if launcher == "SLURM":  # In a job's script, outside of srun, a command is no task.
        monkeypatch.delenv("SLURM_STEP_ID")
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_ranks(SingleDeviceStrategy("cpu"), {"devices": 1})


def test_nodes_that_come_and_go_need_a_store_of_their_own(monkeypatch):
    launched = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "PET_NNODES": "1:4"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    fill_ranks({"devices": "auto"})
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(DloError, match="got --nnodes 1:4; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        fill_ranks({"devices": "auto"})
    monkeypatch.setenv("PET_NNODES", "4:4")
    fill_ranks({"devices": "auto"})
    monkeypatch.delenv("PET_NNODES")
    agent = ["sh", "-c", "sleep 20 & echo $!; wait", "torchrun", "--nnodes=2:3"]  # With a script between it and a rank.
    with subprocess.Popen(agent, stdout=subprocess.PIPE, start_new_session=True) as process:
        script = int(process.stdout.readline())
        monkeypatch.setattr(os, "getppid", lambda: script)
        with pytest.raises(DloError, match="got --nnodes 2:3"):
            fill_ranks({"devices": "auto"})
        os.killpg(process.pid, signal.SIGKILL)
