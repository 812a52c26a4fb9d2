"""Models cut by inferred tensor rules on two gloo ranks: loss, gradients and weights of one process, in double."""

import copy
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dlo_framework.plan import ParallelPlan
from dlo_framework.shards import get_layout
from dlo_framework.task import Task
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.foreign_transformer import ForeignTask
from support.tensor_models import assert_close, noisy, sum_partial, whole_gradients, whole_weights
from support.token_batches import VOCABULARY, Tokens

BEIT = {"depth": 2, "embed_dim": 32, "num_heads": 4}
ONE_HEAD = {"num_hidden_layers": 2, "multi_query": True, "new_decoder_architecture": False, "alibi": False}
#: Biases of heads from outside of the attention, and one projection of queries and of fewer keys and values.
BY_HEAD: list[tuple[str, str, dict[str, Any]]] = [
    ("bloom", "bloom", {"n_layer": 2}),
    ("mpt", "mpt", {"n_layers": 2}),
    ("falcon, one key/value head", "falcon", ONE_HEAD),
    ("falcon, biases, one key/value head", "falcon", ONE_HEAD | {"alibi": True}),
    ("falcon, groups", "falcon", {"num_hidden_layers": 2, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gpt_bigcode", "gpt_bigcode", {"n_layer": 2}),
]


class OwnRules(ForeignTask):
    def parallel_plan(self) -> ParallelPlan:
        attention = {"layers.*.mix.qkv": "qkv_grouped", "layers.*.mix.out": "row", "layers.*.mix": "local_shapes"}
        rest = dict.fromkeys(("before", "after", "up", "down"), "sequence")
        tensor = {**attention, **{f"layers.*.{name}": rule for name, rule in rest.items()}}
        return replace(super().parallel_plan(), tensor=tensor, head_widths={"layers.*.mix": 8})


class Shapes:
    seq_len = 16


def made() -> dict[str, tuple[Task, float]]:
    """Tasks with the largest difference: transformers' own norms and attentions compute in single precision."""
    images = {"num_classes": 3, "image_size": 32}
    return {
        "own": (ForeignTask(), 1e-10),
        "own, fused": (ForeignTask(fused=True), 1e-10),
        "own, one key/value head": (ForeignTask(fused=True, one_key=True), 1e-10),
        "own rules, one key/value head, sequence": (OwnRules(fused=True, one_key=True), 1e-10),
        "own, trained bias": (ForeignTask(bias=True), 1e-10),
        "own, three heads": (ForeignTask(heads=3, width=24), 1e-10),
        "beit": (ImageClassifier("beit_base_patch16_224", model_args=BEIT, **images), 1e-7),
        "bart": (CausalLM(config=tiny("bart", dropout=False)), 1e-7),
        **{name: (CausalLM(config=tiny(kind, dropout=False, **more)), 1e-10) for name, kind, more in BY_HEAD},
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
    applier = TensorParallel(sequence_parallel="sequence" in name)
    plan = applier.complete_plan(shared, shared.parallel_plan(), 2, Shapes())
    applier.apply(shared.model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    if any(name == one for one, *_ in BY_HEAD):
        cut = {key.rsplit(".", 2)[-2] for key in get_layout(shared.model).slices}
        assert cut & {"query_key_value", "Wqkv", "c_attn"}, f"{name}: its attention is whole"
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


#: One of each layout of heads and of each library; the slow test has all.
SOME = ("own rules, one key/value head, sequence", "own, three heads", "beit", "bloom", "falcon, groups")


def check(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    assert dist.get_world_size() == world_size == 2
    tasks = made()
    for name in names or tasks:
        steps(name, *tasks[name])


def build(kind: str, optimizer: str = "adamw", recompute: bool = False, **more: Any) -> tuple[CausalLM, Any]:
    warnings.filterwarnings("ignore")
    options: dict[str, Any] = {"optimizer": optimizer, "lr": 1e-2, "schedule": "constant", "weight_decay": 0.1}
    config = tiny(kind, dropout=False, **more) | {"vocab_size": VOCABULARY}
    return CausalLM(config=config, recompute=recompute, optimizer_args={"eps": 1e-3}, **options), Tokens(1)


CLIPS = {"gradient_clip_val": 0.05}
TP = partial(MeshStrategy, tp=2, dp_shard=1)
MORE = [
    *(Case(TP, {"kind": kind, **more, "optimizer": "lamb"}, CLIPS, name=name) for name, kind, more in BY_HEAD),
    *(Case(TP, {"kind": kind, **more, "recompute": True}, CLIPS, name=name) for name, kind, more in BY_HEAD),
]
FOUR = [
    Case(partial(MeshStrategy, **{"tp": 2, "dp_shard": 1, **axes}), {"kind": kind, **more}, CLIPS, name=name)
    for axes in ({"dp_shard": 2}, {"cp": 2}, {"pp": 2, "micro_batches": 2})
    for name, kind, more in BY_HEAD
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, MORE), (4, FOUR)],
)
def test_clipped_runs_of_divided_heads_are_one_process(ranks: int, cases: list[Case]) -> None:
    assert_parity(build, cases, world_size=ranks, steps=2, rtol=1e-4)


@pytest.mark.parametrize("names", [SOME, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_models_cut_by_inferred_rules_train_as_one_process(names: tuple[str, ...]) -> None:
    run_distributed(check, 2, names)
