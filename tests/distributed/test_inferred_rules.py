"""Models cut by inferred tensor rules on two gloo ranks: loss, gradients and weights of one process, in double."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_plugins.appliers.tensor_parallel import TensorParallel
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.llm.causal_lm import CausalLM
from support.causal_types import tiny
from support.foreign_transformer import ForeignTask
from support.tensor_models import assert_close, noisy, sum_partial, whole_gradients, whole_weights

BEIT = {"depth": 2, "embed_dim": 32, "num_heads": 4}


class Shapes:
    seq_len = 16


def made() -> dict[str, tuple[Task, float]]:
    """Tasks with the largest difference: transformers' own norms and attentions compute in single precision."""
    images = {"num_classes": 3, "image_size": 32}
    return {
        "own": (ForeignTask(), 1e-10),
        "own, fused": (ForeignTask(fused=True), 1e-10),
        "own, three heads": (ForeignTask(heads=3, width=24), 1e-10),
        "beit": (ImageClassifier("beit_base_patch16_224", model_args=BEIT, **images), 1e-7),
        "bart": (CausalLM(config=tiny("bart", dropout=False)), 1e-7),
        "olmoe": (CausalLM(config=tiny("olmoe", dropout=False) | {"num_hidden_layers": 2}), 1e-4),
    }


def batch_of(task: Task) -> Any:
    draw = torch.Generator().manual_seed(2)
    if isinstance(task, ImageClassifier):
        return torch.randn(2, 3, 32, 32, generator=draw, dtype=torch.float64), torch.tensor([0, 2])
    ids = torch.randint(3, 60, (2, 17), generator=draw)
    if isinstance(task, ForeignTask):
        return ids[:, :-1], ids[:, 1:]
    found = {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "position_ids": torch.arange(16).expand(2, 16)}
    return found | {"tokens_in_step": torch.tensor(32)}


def loss_of(task: Any, batch: Any) -> Tensor:
    args, kwargs = task.inputs(batch)
    return task.loss(task(*args, **kwargs), batch)


def steps(name: str, task: Any, tolerance: float) -> None:
    torch.manual_seed(0)
    task.configure_model()
    if name != "olmoe":  # Its product of experts has no double precision.
        task.double()
    noisy(task.model)
    shared = copy.deepcopy(task)
    applier = TensorParallel()
    plan = applier.complete_plan(shared, shared.parallel_plan(), 2, Shapes())
    applier.apply(shared.model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    batch = batch_of(task)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (task, shared)]
    for _ in range(2):
        expected, found = loss_of(task, batch), loss_of(shared, batch)
        assert abs(float(found - expected)) <= tolerance, f"{name}: {found} {expected}"
        expected.backward()
        found.backward()
        gradients = {key: p.grad for key, p in task.model.named_parameters() if p.grad is not None}
        assert max(float(grad.abs().max()) for grad in gradients.values()) > 1e-3, name
        assert_close(whole_gradients(shared.model), gradients, tolerance, name)
        sum_partial(shared.model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {key: p.detach() for key, p in task.model.named_parameters()}
    assert_close(whole_weights(shared.model), weights, tolerance, name)


def check_all(rank: int, world_size: int) -> None:
    assert dist.get_world_size() == world_size == 2
    for name, (task, tolerance) in made().items():
        steps(name, task, tolerance)


def test_models_cut_by_inferred_rules_train_as_one_process() -> None:
    run_distributed(check_all, 2)
