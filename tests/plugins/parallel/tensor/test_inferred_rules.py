"""Tensor rules of models whose families bring none: what is found, what the proof refuses, and runs on two ranks."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan, Rule
from dlo_framework.shards import get_layout
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.tensor import installation
from dlo_plugins.parallel.tensor.block_proof import run_on_threads
from dlo_plugins.parallel.tensor.inferred_rules import InferredRules, infer_rules, lacks_rules
from dlo_plugins.parallel.tensor.installation import install_plan
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.parallel.tensor.tp_planner import SHAPING, make_tp_plan
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.foreign_transformer import ForeignTask
from support.tensor_models import assert_close, noisy, sum_partial, whole_gradients, whole_weights


class Shapes:
    seq_len = 16


def rules_of(task: Task) -> InferredRules:
    task = task.on_meta()
    return infer_rules(task, task.parallel_plan(), Shapes())


def kinds(found: InferredRules) -> dict[str, str]:
    """Rules of projections and tensors, without those that only say that a module works on full activations."""
    return {name: str(rule) for name, rule in found.plan.tensor.items() if rule not in (Rule.SEQUENCE, *SHAPING)}


@pytest.mark.parametrize("fused", [False, True])
def test_a_users_own_transformer_is_cut(fused: bool) -> None:
    found = rules_of(ForeignTask(fused=fused))
    of_attention = {"qkv": "qkv"} if fused else {"q": "heads", "k": "heads", "v": "heads"}
    assert kinds(found) == {
        **{f"layers.*.mix.{name}": rule for name, rule in of_attention.items()},
        **{"layers.*.mix.out": "row", "layers.*.up": "column", "layers.*.down": "row"},
    }
    # The code takes the number of features from its input's shape, and no attribute has the width of a head.
    assert found.plan.tensor["layers.*.mix"] is Rule.LOCAL_SHAPES
    assert found.plan.head_widths == {"layers.*.mix": 8}
    assert not found.whole


BEIT = {"depth": 2, "embed_dim": 32, "num_heads": 4}


@pytest.mark.parametrize(
    "family",
    [
        "bart",  # Attention in the block itself, beside a cross attention that never runs.
        "olmoe",  # Grouped queries, norms over all heads, and experts in one tensor.
        "bloom",  # Biases of heads come from outside of the block.
        "gpt_bigcode",  # One projection of all queries, one key and one value.
        "trocr",  # Attention compares shapes with its attribute, and reshapes to its full width.
        "beit",  # Biases are added by hand.
    ],
)
def test_families_without_rules_are_cut_in_full(family: str) -> None:
    """How each trains is tested below."""
    images = {"num_classes": 3, "image_size": 64, "model_args": BEIT}
    task = ImageClassifier("beit_base_patch16_224", **images) if family == "beit" else task_of(family)
    found = rules_of(task)
    assert not found.whole
    assert Rule.ROW in found.plan.tensor.values()


def test_queries_beside_one_key_and_value() -> None:
    """A user's module has no attribute with the number of key/value heads, and repeats the key for all heads."""
    task = ForeignTask(fused=True, one_key=True).on_meta()
    found = rules_of(task)
    assert not found.whole
    assert kinds(found)["layers.*.mix.qkv"] == "qkv_grouped"
    applier = TensorParallel()
    plan = applier.complete_plan(task, task.parallel_plan(), 4)
    cut = make_tp_plan(task.model, plan, 4)
    assert cut.divisions["layers.0.mix.qkv.weight"].pieces == (32, 8, 8)
    assert cut.regions["layers.0.mix"].gathered == {"layers.0.mix.qkv": 16}
    runs = [cut.divisions["layers.0.mix.qkv.weight"].slice_for(4, rank).runs for rank in range(4)]
    rows = sorted(row for run in runs for first, count in run for row in range(first, first + count))
    assert rows == list(range(48))  # Each row belongs to one rank.
    few = ForeignTask(fused=True, one_key=True, width=12, heads=4).on_meta()  # Heads of 3 features.
    undivided = make_tp_plan(few.model, applier.complete_plan(few, few.parallel_plan(), 2), 2)
    assert "layers.0.mix" not in undivided.regions


@pytest.mark.slow
def test_queries_keys_and_values_of_different_widths() -> None:
    """LeViT: heads of queries and keys of 4 features, of values of 8, each head's together; batch norms between."""
    args = {"embed_dim": (16, 32), "key_dim": 4, "depth": (2, 2), "num_heads": (2, 4), "attn_ratio": 2}
    task = ImageClassifier("levit_128s", num_classes=3, image_size=224, model_args=args).on_meta()
    found = infer_rules(task, task.parallel_plan())
    plan = found.plan
    block = "stages.1.blocks.0.attn"
    assert plan.rule_for(f"{block}.qkv.linear") is Rule.HEADS
    assert plan.rule_for(f"{block}.qkv.bn") is Rule.PER_CHANNEL
    assert plan.rule_for(f"{block}.attention_biases") is Rule.HEADS
    assert plan.rule_for("stages.1.downsample.attn_downsample.kv.linear") is Rule.HEADS  # 12 features a head, not 4
    assert plan.rule_for("stages.1.downsample.attn_downsample.q.ln.linear") is Rule.COLUMN
    cut = make_tp_plan(task.model, TensorParallel().complete_plan(task, task.parallel_plan(), 2), 2)
    assert (cut.regions[block].heads, cut.regions[block].width) == (4, 16)


def test_heads_that_are_mixed_stay_whole_with_the_reason() -> None:
    found = rules_of(ForeignTask(mixes_heads=True))
    assert "layers.*.down" in found.cut
    assert [*found.whole] == ["layers.*.mix.out"]


def test_features_that_are_compared_with_each_other_stay_whole() -> None:
    """Shapes would fit: only values tell that each rank would normalise its own features alone."""
    found = rules_of(ForeignTask(normalises=True))
    assert found.cut == ("layers.*.mix.out",)
    assert "differs by" in found.whole["layers.*.down"]


class Lone(nn.Module):
    """One projection in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.only(x).relu()


class LoneTask(ForeignTask):
    def configure_model(self) -> None:
        if not self.has_model:
            self.model = nn.Sequential(nn.Embedding(64, 8), nn.Sequential(Lone(), Lone()))


def test_a_model_without_pairs_is_refused_with_what_is_in_the_way() -> None:
    task = LoneTask().on_meta()
    with pytest.raises(DloError, match=r"got none from Sequential, and none can be inferred \(no linear layer"):
        TensorParallel().complete_plan(task, task.parallel_plan(), 2)


def test_the_ranks_divide_some_regions_only() -> None:
    task = ForeignTask(heads=3, width=24).on_meta()
    applier = TensorParallel()
    plan = applier.complete_plan(task, task.parallel_plan(), 2)
    found = make_tp_plan(task.model, plan, 2)
    assert {row for region in found.regions.values() for row in region.rows} == {f"layers.{n}.down" for n in range(2)}
    threes = make_tp_plan(task.model, applier.complete_plan(task, task.parallel_plan(), 3), 3)
    assert {row for region in threes.regions.values() for row in region.rows} >= {"layers.0.mix.out", "layers.1.down"}
    with pytest.raises(DloError, match=r"tp must divide the .* set tp="):
        applier.complete_plan(task, task.parallel_plan(), 7)


def test_the_models_own_rules_win_and_are_not_proved_again(monkeypatch) -> None:
    monkeypatch.setattr("dlo_plugins.parallel.tensor.inferred_rules.infer_rules", lambda *args: 1 / 0)
    task = CausalLM(config=tiny("llama", dropout=False)).on_meta()
    plan = task.parallel_plan()
    assert TensorParallel().complete_plan(task, plan, 2) is plan


def test_sequence_parallelism_needs_rules_of_the_family() -> None:
    task = ForeignTask().on_meta()
    with pytest.raises(DloError, match="sequence_parallel must have the tensor rules of the model's family"):
        TensorParallel(sequence_parallel=True).complete_plan(task, task.parallel_plan(), 2)


# models cut by inferred tensor rules on two gloo ranks: loss, gradients and weights of one process, in double


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


@pytest.mark.parametrize("names", [SOME, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_models_cut_by_inferred_rules_train_as_one_process(names: tuple[str, ...]) -> None:
    run_distributed(check, 2, names)


# --- attentions that a family's own rules leave whole: multi-head latent attention, and what stays as it was ---------


#: Settings of a small model with multi-head latent attention, whose code computes in double precision throughout.
LATENT = {"num_hidden_layers": 2}


def task_of(family: str, **more: Any) -> CausalLM:
    return CausalLM(config=tiny(family, dropout=False) | more)


def completed(task: Any, tp: int = 2, **options: Any) -> ParallelPlan:
    return TensorParallel(**options).complete_plan(task, task.parallel_plan(), tp, Shapes())


def test_latent_attention_is_divided_by_heads() -> None:
    task = task_of("deepseek_v3", q_lora_rank=24).on_meta()
    own, plan = task.parallel_plan(), completed(task)
    assert list(plan.tensor.items())[: len(own.tensor)] == list(own.tensor.items())  # The family's rules come first.
    assert plan.shared_features == {"model.layers.*.self_attn.kv_a_proj_with_mqa": task.model.config.qk_rope_head_dim}
    found = make_tp_plan(task.model, plan, 2)
    assert {name.split(".mlp.")[1] for name in found.divisions if ".0.mlp." in name} == {
        f"{name}_proj.weight" for name in ("gate", "up", "down")
    }  # transformers' plan leaves the MLP of layers without experts whole.
    attention = {name for name in found.divisions if ".0.self_attn." in name}
    divided = {f"{name}_proj.weight" for name in ("q_b", "kv_b", "o")}
    assert {name.split(".self_attn.")[1] for name in attention} == divided
    region = found.regions["model.layers.0.self_attn"]
    assert region.heads == task.model.config.num_attention_heads
    assert not {name for name in found.partial if ".self_attn." in name}


def gradients(task: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    args, kwargs = task.inputs({"input_ids": ids, "position_ids": torch.arange(16)[None]})
    output = task.forward(*args, **kwargs)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (output * weights).sum().backward()
    return {name: one.grad for name, one in task.model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("shares", [True, False])
def test_gradients_of_latent_attention_are_those_of_one_process(shares: bool, monkeypatch: Any) -> None:
    """Without the sum over the common key, the gradient of the projection that all ranks hold would be partial."""
    torch.manual_seed(0)
    task: Any = task_of("minicpm3", **LATENT)
    task.configure_model()
    task.double()
    plan = make_tp_plan(task.model, completed(task), 2)
    if not shares:
        monkeypatch.setattr(installation, "install_sharing", lambda *args: None)
    ids = torch.randint(3, 60, (1, 16), generator=torch.Generator().manual_seed(1))

    def run(communicator: Any) -> dict[str, torch.Tensor]:
        own: Any = task_of("minicpm3", **LATENT)
        own.configure_model()
        own.model.load_state_dict(task.model.state_dict())
        own.double()
        install_plan(own.model, plan, communicator)
        return gradients(own, ids)

    ranks, expected, worst = run_on_threads(2, run), gradients(task, ids), dict[str, float]()
    for name, full in expected.items():
        scale = max(float(full.abs().max()), 1e-3)
        for rank, grads in enumerate(ranks):
            division = plan.divisions.get(name)
            wanted = full if division is None else division.slice_for(2, rank).slice_tensor(full)
            found = sum(one[name] for one in ranks) if name in plan.partial else grads[name]
            worst[name] = max(worst.get(name, 0.0), float((found - wanted).abs().max()) / scale)
    wrong = {name.split(".")[-2] for name, error in worst.items() if error > 1e-10}
    assert wrong == (set() if shares else wrong | {"kv_a_proj_with_mqa"})


def test_what_a_plan_names_itself_stays() -> None:
    task = task_of("deepseek_v3").on_meta()
    own = task.parallel_plan()
    assert completed(task, sequence_parallel=True) == own  # Inferred rules have no split sequence.
    assert lacks_rules(task.model, own)
    named = dict.fromkeys(("model.layers.*.self_attn", "model.layers.0.mlp"), Rule.REPLICATE)
    assert not lacks_rules(task.model, replace(own, tensor={**own.tensor, **named}))
    llama = task_of("llama").on_meta()
    assert not lacks_rules(llama.model, llama.parallel_plan())
    vit = ImageClassifier("vit_tiny_patch16_224", num_classes=3).on_meta()
    assert not lacks_rules(vit.model, vit.parallel_plan())


def test_gpt_oss_has_its_heads_and_sinks_divided_beside_experts_with_biases() -> None:
    task = task_of("gpt_oss").on_meta()
    inferred = infer_rules(task, task.parallel_plan(), Shapes()).plan.tensor
    rules = {name.split(".self_attn.")[-1]: rule for name, rule in inferred.items()}
    assert (rules["q_proj"], rules["sinks"], rules["o_proj"]) == (Rule.HEADS, Rule.HEADS, Rule.ROW)
    found = make_tp_plan(task.model, completed(task), 2)
    assert "model.layers.0.mlp.experts.down_proj_bias" in found.partial
