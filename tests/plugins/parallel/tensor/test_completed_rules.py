"""Attentions that a family's own rules leave whole: multi-head latent attention, and what stays as it was."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dlo_framework.plan import ParallelPlan, Rule
from dlo_plugins.parallel.tensor import installation
from dlo_plugins.parallel.tensor.block_proof import run_on_threads
from dlo_plugins.parallel.tensor.inferred_rules import infer_rules, lacks_rules
from dlo_plugins.parallel.tensor.installation import install_plan
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.parallel.tensor.tp_planner import make_tp_plan
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny

#: Settings of a small model with multi-head latent attention, whose code computes in double precision throughout.
LATENT = {"num_hidden_layers": 2}


class Shapes:
    seq_len = 16


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
    assert {name.split(".self_attn.")[1] for name in attention} == {
        "q_b_proj.weight",
        "kv_b_proj.weight",
        "o_proj.weight",
    }
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
