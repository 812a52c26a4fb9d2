"""Units that are sharded as one: from a task's plan, from repetition or by size; what has no blocks trains sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_framework import ParallelPlan, Task
from dlo_framework.distributed.model_units import find_units
from dlo_framework.errors import DloError
from dlo_framework.plan import NoBlocksError
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from support.fsdp_nets import WIDTH, check_fit, fit
from support.on_ranks import on_ranks


class Branches(nn.Module):
    """Layers of one class, of which none follows another in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.norm, self.right = nn.Linear(WIDTH, 9), nn.LayerNorm(9), nn.Linear(WIDTH, 9)
        self.out = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.tanh(self.left(x)) * self.right(x)))


class Without(Task):
    """A task whose model has no blocks, and for which nobody has written a plan."""

    net: Any = Branches

    def configure_model(self) -> None:
        if not self.has_model:
            torch.manual_seed(0)
            self.model = self.net()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-5)


class Bare(Without):
    """A model that is one layer."""

    net = staticmethod(lambda: nn.Linear(WIDTH, 5))


class Twice(Without):
    """A layer that a container has twice, in a model whose blocks are inferred."""

    def net(self) -> nn.Module:
        again = nn.Linear(9, 9)
        return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), again, again, nn.Linear(9, 5))


def made(kind: type[Task]) -> Task:
    task = kind()
    task.configure_model()
    return task


def test_a_task_without_blocks_is_sharded_by_size() -> None:
    assert find_units(made(Without)) == ["model.left", "model.norm", "model.right", "model.out"]
    assert find_units(made(Bare)) == ["model"]
    shared = nn.Linear(4, 4)
    assert find_units(nn.Sequential(shared, nn.ReLU(), nn.ModuleDict({"again": shared}))) == ["0"]
    for name in ("dla34", "regnetv_040"):
        task = ImageClassifier(name, num_classes=3).on_meta()
        with pytest.raises(NoBlocksError):
            task.parallel_plan()
        units = find_units(task)
        assert len(units) > 16
        assert not any(unit.startswith(f"{other}.") for unit in units for other in units)


def test_an_error_in_a_plan_of_ones_own_stays_one() -> None:
    class Wrong(Without):
        def parallel_plan(self) -> ParallelPlan:
            raise DloError("the plan is wrong")

    with pytest.raises(DloError, match="the plan is wrong"):
        find_units(made(Wrong))


@on_ranks(2)
def test_a_task_without_blocks_trains_sharded_as_in_one_process(rank: int, world: int) -> None:
    for kind in (Without, Bare, Twice):
        task, before = kind(), made(kind).state_dict()
        fit(0, 1, task, "auto")
        expected = {name: value.clone() for name, value in task.state_dict().items()}
        assert all(not torch.equal(before[name], value) for name, value in expected.items())
        for strategy in (ZeroStrategy(3), FSDPStrategy()):
            check_fit(rank, world, kind(), strategy, expected)
