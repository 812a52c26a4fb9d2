"""Sums and means over ranks: values, memory, waiting for a rank that is late, and no barrier."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_framework.distributed import collectives
from dlo_framework.distributed.collectives import (
    Communicator,
    HostReceive,
    backend_of,
    broadcast_values,
    is_sent_by_host,
)
from dlo_framework.distributed.groups import MeshGroups, gloo_group
from dlo_framework.distributed.launcher import set_collective_timeout
from dlo_framework.distributed.step_primitives import mean_over_data
from dlo_framework.errors import DloError, mark_agreed
from dlo_framework.mesh import MeshSpec
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.context.shared_attention import Ring
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.pipeline.exchange import Transport
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.trainers import quiet_trainer

LENGTHS = (0, 1, 7, 1000)  # of a segment


def _all(rank: int, world_size: int) -> None:
    communicator = Communicator()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for length in (*LENGTHS, *reversed(LENGTHS)):
            values = torch.arange(length * world_size) % 50
            reduced = communicator.reduce_scatter((values * (rank + 1)).to(dtype)).wait()
            total = values * sum(range(1, world_size + 1))
            assert torch.equal(reduced, communicator.segment(total).to(dtype)), (dtype, length)
            buffer = torch.full((length * world_size,), -1, dtype=dtype)
            communicator.segment(buffer).copy_(communicator.segment(values))
            assert torch.equal(communicator.all_gather(buffer).wait(), values.to(dtype)), (dtype, length)
    for dtype in (torch.float16, torch.float32):
        # In half precision the sum of two is infinite.
        large = torch.full((4 * world_size,), 60_000.0, dtype=dtype)
        assert torch.equal(
            communicator.reduce_scatter(large, average=True).wait(), torch.full((4,), 60_000.0).to(dtype)
        )
    first, second = (torch.full((8 * world_size,), float(n + rank)) for n in (1, 10))
    under_way = [communicator.reduce_scatter(first), communicator.reduce_scatter(second)]
    found = [float(pending.wait()[0]) for pending in reversed(under_way)]
    ranks = sum(range(world_size))
    assert found == [10 * world_size + ranks, world_size + ranks]


@pytest.mark.parametrize("world_size", [1, 3])
def test_they_are_what_torch_computes_at_any_length_and_several_at_once(world_size):
    run_distributed(_all, world_size)


def _on_an_accelerator(rank: int, world_size: int) -> None:
    """gloo sends single ranks tensors of the CPU alone; of this group's others, fake ones stand for them."""
    communicator, called = Communicator(), []
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        for name in ("reduce_scatter_tensor", "all_gather_into_tensor", "isend", "irecv"):
            patch.setattr(dist, name, lambda *_, name=name, **__: called.append(name) or SimpleNamespace(wait=int))
        buffer = torch.empty(4 * world_size, device="cuda")
        assert communicator.all_gather(buffer).wait() is buffer
        assert communicator.reduce_scatter(buffer).wait().shape == (4,)
        assert called == ["all_gather_into_tensor", "reduce_scatter_tensor"]
    assert not is_sent_by_host(None, torch.device("cpu"))
    assert is_sent_by_host(None, torch.device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "is_sent_by_host", lambda *_: True)
        passed = Ring(None).shift(torch.full((3,), float(rank)), 1, "keys").wait()
        assert passed.tolist() == [(rank - 1) % world_size] * 3
        transport = Transport(dist.group.WORLD, torch.device("cpu"))
        transport.connect([(0, 1)])
        link, number = transport.link(1 - rank, incoming=rank == 1), torch.zeros(2)
        work = link.receive(number) if rank else link.send(number + 7)
        link.wait(work)
        assert number.tolist() == [7.0 * rank] * 2
        assert isinstance(work, HostReceive) == (rank == 1)


def _late(rank: int, world_size: int) -> None:
    set_collective_timeout(timedelta(seconds=2))
    communicator = Communicator()
    communicator.all_gather(torch.zeros(world_size)).wait()
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
            communicator.reduce_scatter(torch.zeros(world_size)).wait()
    else:
        time.sleep(3)


def _named(rank: int, world_size: int) -> list[str]:
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    return [str(dist.get_backend(group)), *(backend_of(g, torch.device("cpu")) for g in (group, None))]


def _laid_out(rank: int, world_size: int) -> dict[str, tuple[list, list]]:
    """Tensors in the middle of other memory, with the rank's values; returns them and the bytes around them."""
    memory = torch.full((3, 4), float(rank))
    images = torch.arange(2 * 3 * 4 * 4).view(2, 3, 4, 4) + 1000 * rank
    tensors = {
        "slice": (memory[:, :2], memory[:, 2:]),
        "transposed": ((torch.arange(12).view(3, 4) + 100 * rank).t(), torch.empty(0)),
        # Ranks may differ in how theirs lie.
        "channels last on one rank": (
            images.contiguous(memory_format=torch.channels_last) if rank == 0 else images,
            torch.empty(0),
        ),
        "expanded": (torch.full((1, 4), float(rank)).expand(3, 4), torch.empty(0)),
        "one number for many": (torch.full((1,), float(rank)).expand(50_000), torch.empty(0)),
        "expanded on one rank": (
            torch.full((1,), float(rank)).expand(6) if rank else torch.zeros(6),
            torch.empty(0),
        ),
        "complex": (torch.full((2, 6), rank + 1j * rank)[:, ::3], torch.empty(0)),
        "parameter": (torch.nn.Parameter(torch.full((4, 2), float(rank)).t()), torch.empty(0)),
        "empty": (torch.empty(3, 0).t(), torch.empty(0)),
        "a number": (torch.tensor(rank), torch.empty(0)),
    }
    for tensor, _ in tensors.values():
        broadcast_values(tensor)
    return {name: (tensor.detach().tolist(), around.tolist()) for name, (tensor, around) in tensors.items()}


def _two(rank: int, world_size: int) -> Any:
    _all(rank, world_size)
    _on_an_accelerator(rank, world_size)
    found = _named(rank, world_size), _laid_out(rank, world_size)
    _late(rank, world_size)  # The last: it leaves the group with a short limit.
    return found


def test_values_reach_tensors_however_they_lie_in_memory_and_nothing_beside_them():
    """And tensors of an accelerator are not sent by gloo; a rank is waited for as long as was set last, after 30 s."""
    (names, first), (_, second) = run_distributed(_two, 2)
    assert names == ["cpu:gloo,cuda:gloo", "gloo", "gloo"], "a device's backend is found among several"
    assert second.pop("slice") == (first["slice"][0], [[1.0] * 2] * 3)
    assert first.pop("slice") == ([[0.0] * 2] * 3, [[0.0] * 2] * 3)
    assert second == first
    assert set(first["one number for many"][0]) == {0.0}


# A mean over the ranks that see different data is what each strategy reduces to, and no rank waits at a barrier


MESHES = ({"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_replicate": 2}, {"cp": 2, "tp": 2, "dp_shard": 1})


class Doubling(DDPStrategy):
    """Reduces in a way of its own."""

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor.mul_(2)


def on(axes: dict[str, int]) -> MeshStrategy:
    strategy = MeshStrategy(**axes)
    strategy.parallel_devices = [torch.device("cpu")] * 4
    strategy._groups = MeshGroups(MeshSpec(**{"dp_shard": 1, **axes}), "cpu")
    return strategy


def _means(rank: int, world_size: int) -> list[tuple[float, float, float]]:
    found = []
    for strategy in (DDPStrategy(), ZeroStrategy(2), SingleDeviceStrategy(), Doubling(), *map(on, MESHES)):
        trainer: Any = SimpleNamespace(strategy=strategy)
        value = torch.tensor(10.0**rank)
        mean_over_data(trainer, value)  # Makes the groups, for which ranks do wait.
        with mock.patch.object(dist, "barrier", side_effect=AssertionError("a rank waits for the others")):
            mean = mean_over_data(trainer, value)
        kept = float(value)
        found.append((float(mean), float(strategy.reduce(value, reduce_op="mean")), kept))
    _later_runs_use_the_same_groups()
    return found


def _later_runs_use_the_same_groups() -> None:
    first, second = (on({"dp_shard": 2, "ep": 2, "tp": 2}).groups for _ in range(2))
    assert first.group("tp") is second.group("tp")
    assert first.expert_group is second.expert_group
    assert first.expert_group is not first.shard_group  # These have the same ranks, and other messages at one time.
    control = gloo_group(ZeroStrategy(2))
    assert gloo_group(ZeroStrategy(3)) is control
    assert gloo_group(DDPStrategy(timeout=timedelta(seconds=77))) is not control
    with pytest.raises(DloError, match="an error of all ranks"):
        quiet_trainer(devices=4, strategy=ZeroStrategy(2), callbacks=[Raising()]).fit(BoringModel())
    assert gloo_group(ZeroStrategy(2)) is not control  # In which messages may be left.


class Raising(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        raise mark_agreed(DloError("an error of all ranks"))


def test_it_is_what_the_strategy_reduces_to_without_a_barrier() -> None:
    for rank, found in enumerate(run_distributed(_means, 4)):
        means = [mean for mean, _, _ in found]
        assert means == [reduced for _, reduced, _ in found]
        assert means[:4] == [277.75, 277.75, 10.0**rank, 2 * 10.0**rank]
        assert {kept for _, _, kept in found} == {10.0**rank}
        assert means[4] == pytest.approx((101 if rank % 2 == 0 else 1010) / 2)  # tp is the innermost axis
