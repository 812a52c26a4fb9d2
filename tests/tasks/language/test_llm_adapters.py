"""Low-rank adapters and frozen parts: what trains, what is refused, and what merging gives."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.errors import DloError
from dlo_tasks.language import adapters
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import SMALL

IDS = torch.arange(12).view(2, 6)


def make(family: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4} if family == "gpt2" else SMALL
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **more)).eval()


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(("family", "count"), [("llama", 7), ("gpt_neox", 4), ("gpt2", 4)])
def test_every_projection_of_the_blocks_is_adapted_and_nothing_else_trains(family: str, count: int) -> None:
    model = make(family)
    before = model(input_ids=IDS).logits
    adapters.add_adapters(model, model.get_output_embeddings(), Lora(rank=3), torch.float32)
    assert torch.equal(model(input_ids=IDS).logits, before)  # B begins as zero
    assert len(adapters.adapter_layers(model)) == 2 * count
    assert all(".lora_" in name for name in trained(model))
    assert len(trained(model)) == 2 * 2 * count
    shapes = {parameter.shape[0] for name, parameter in model.named_parameters() if ".lora_A." in name}
    assert shapes == {3}


def test_targets_are_those_that_are_named_the_head_too() -> None:
    model = make()
    adapters.add_adapters(model, model.lm_head, Lora(targets=["layers.0.self_attn.q_proj", "lm_head"]), torch.float32)
    assert set(adapters.adapter_layers(model)) == {"model.layers.0.self_attn.q_proj", "lm_head"}


def test_an_unknown_target_is_refused_with_the_nearest_name() -> None:
    model = make()
    with pytest.raises(DloError, match=r"lora.targets must be among q_proj, .*, got q_porj; did you mean 'q_proj'\?"):
        adapters.add_adapters(model, model.lm_head, Lora(targets=["v_proj", "q_porj"]), torch.float32)
    task = CausalLM(config={"model_type": "llama", **SMALL}, lora=Lora(targets=["w_q"]))
    with pytest.raises(DloError, match=r"lora.targets must be among .*, got w_q"):
        task.check(None)


def test_merged_weights_are_what_the_adapters_made_of_them() -> None:
    model = make("gpt2")
    adapters.add_adapters(model, model.lm_head, Lora(rank=2, alpha=8), torch.float32)
    names = set(make("gpt2").state_dict())
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    expected = model(input_ids=IDS).logits
    layer = model.transformer.h[0].mlp.c_fc
    delta = (8 / 2) * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    wanted = layer.base_layer.weight + delta.T
    adapters.merge_adapters(model)
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.transformer.h[0].mlp.c_fc.weight, wanted)
    assert set(model.state_dict()) == names


def test_adapters_may_be_wider_than_the_weights_they_stand_beside() -> None:
    task = CausalLM(config={"model_type": "llama", **SMALL}, dtype="bfloat16", lora=Lora(rank=2))
    task.configure_model()
    dtypes = {".lora_" in name: parameter.dtype for name, parameter in task.model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    batch = {"input_ids": IDS, "labels": IDS}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        task.training_step(batch, 0)["loss"].backward()
    slopes = {name: p.grad for name, p in task.model.named_parameters() if p.requires_grad}
    assert all(slope is not None and slope.isfinite().all() for slope in slopes.values())


def test_frozen_parts_are_named_by_patterns() -> None:
    model = make(tie_word_embeddings=True)
    every = trained(model)
    adapters.freeze_parameters(model, ["lm_head", "model.layers.*.self_attn"])
    assert trained(model) == {name for name in every if "embed" not in name and "self_attn" not in name}
    with pytest.raises(
        DloError, match=r"freeze must match parameters of the model, got 'model.layer'; did you mean 'model.layers"
    ):
        adapters.freeze_parameters(model, ["model.layer"])
    with pytest.raises(DloError, match="freeze must leave a parameter to train"):
        adapters.freeze_parameters(model, ["model", "lm_head"])


@pytest.mark.parametrize("values", [{"rank": 0}, {"alpha": -1.0}, {"dropout": 1.0}, {"targets": []}])
def test_adapters_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(DloError, match=f"lora.{next(iter(values))}"):
        Lora(**values)
