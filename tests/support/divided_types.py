"""Small models of many types on two ranks, divided by tensor parallelism or cut into stages, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.pipeline.pipeline_engine import Pipeline
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from support.tensor_models import assert_close, noisy, whole_gradients

#: Function of a type that returns its task, with its model in evaluation, since routers may have noise in training,
#: and a batch.
Make = Callable[[str], tuple[Any, dict[str, Any]]]
#: Types whose gradients are NaN in double precision.
_SINGLE = {"led", "longformer"}


def check_divided(make: Make, kinds: Sequence[str], refused: set[str]) -> None:
    """Compares types under `tp: 2` with one process; those to be refused must be."""
    found = run_distributed(_each, 2, _divide, make, kinds, timeout=1100)
    assert set(found[0]) == refused, found[0]


def check_cut(make: Make, kinds: Sequence[str]) -> None:
    """Compares types in two stages with one process."""
    assert run_distributed(_each, 2, _cut, make, kinds, timeout=1100)[0] == {}


def _each(rank: int, world_size: int, run: Callable[..., Any], make: Make, kinds: Sequence[str]) -> dict[str, str]:
    """Returns why types are refused."""
    refused = {}
    for kind in kinds:
        torch.manual_seed(0)
        task, batch = make(kind)
        task = task if kind in _SINGLE else task.double()
        noisy(task.model)
        try:
            loss, gradients = run(copy.deepcopy(task), batch)
        except DloError as error:
            refused[kind] = str(error)
            continue
        expected = task.training_step(batch, 0)["loss"]
        expected.backward()
        own = {name: weight.grad for name, weight in task.model.named_parameters() if weight.grad is not None}
        own["loss"], gradients["loss"] = expected.detach(), loss.detach()
        assert len(gradients) > 1
        # A tied weight that has no gradient in one process has zeros.
        wanted = {name: own.get(name, torch.zeros_like(found)) for name, found in gradients.items()}
        assert_close(gradients, wanted, 1e-4 if kind in _SINGLE else 1e-6, kind)
    return refused


def _divide(task: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    applier = TensorParallel()
    plan = applier.complete_plan(task, task.parallel_plan(), dist.get_world_size())
    applier.apply(task.model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), plan)
    loss = task.training_step(batch, 0)["loss"]
    loss.backward()
    return loss, whole_gradients(task.model)


def _cut(task: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    assert dist.group.WORLD is not None
    pipeline = Pipeline(task.model, task.parallel_plan(), dist.group.WORLD)
    loss = pipeline.train_step([batch], lambda part: task(**task.inputs(part)[1]), task.loss, [1.0])
    own = {name: weight.grad for name, weight in task.model.named_parameters() if pipeline.ownership(name)}
    return loss, {name: gradient for name, gradient in own.items() if gradient is not None}
