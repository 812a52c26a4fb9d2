"""A mean over the ranks that see different data is what each strategy reduces to, and no rank waits at a barrier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.step_primitives import mean_over_data
from dlo_framework.mesh import MeshSpec
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy

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
    return found


def test_it_is_what_the_strategy_reduces_to_without_a_barrier() -> None:
    for rank, found in enumerate(run_distributed(_means, 4)):
        means = [mean for mean, _, _ in found]
        assert means == [reduced for _, reduced, _ in found]
        assert means[:4] == [277.75, 277.75, 10.0**rank, 2 * 10.0**rank]
        assert {kept for _, _, kept in found} == {10.0**rank}
        assert means[4] == pytest.approx((101 if rank % 2 == 0 else 1010) / 2)  # tp is the innermost axis
