"""QLoRA: adapters beside 4-bit weights learn as beside the dequantised ones; what is refused; what an export holds."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.errors import DloError
from dlo_framework.models.four_bit_linear import FourBitLinear
from dlo_tasks.language import adapters
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import SMALL

SIZES: dict[str, Any] = {**SMALL, "hidden_size": 64, "intermediate_size": 96}
IDS = torch.arange(24).view(2, 12)


def make(**lora: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    adapters.add_adapters(model, model.lm_head, Lora(rank=3, base_block=32, **lora), torch.float32)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def compare_gradients(model: Any) -> Any:
    """Compares the gradients of the adapters with those beside dequantised weights; returns the model of these."""
    plain = copy.deepcopy(model)
    adapters.dequantise_base(plain)
    for each in (model, plain):
        each(input_ids=IDS, labels=IDS).loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert all(".lora_" in name for name in found)
    for name, gradient in found.items():
        assert float((gradient - expected[name]).norm() / expected[name].norm()) < 1e-5, name
    return plain


@pytest.mark.parametrize(
    "lora",
    [
        {"base": "nf4"},
        {"base": "int4", "dora": True},
        {"base": "nf4", "targets": ["q_proj"], "double_quantisation": True},
    ],
)
def test_gradients_of_adapters_are_those_of_the_dequantised_model(lora: dict[str, Any]) -> None:
    model = make(**lora)
    assert sum(isinstance(module, FourBitLinear) for module in model.modules()) == 14
    compare_gradients(model)


def test_the_weights_take_a_little_more_than_half_a_byte() -> None:
    model = make(base="nf4")
    held = sum(p.nbytes for m in model.modules() if isinstance(m, FourBitLinear) for p in m.parameters())
    count = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, FourBitLinear))
    assert held / count == 0.5 + 2 / 32
    model = make(base="nf4", double_quantisation=True)
    layers = [m for m in model.modules() if isinstance(m, FourBitLinear)]
    assert sum(p.nbytes for m in layers for p in m.parameters()) == sum(
        m.in_features * m.out_features * (0.5 + 1 / 32) + 4 * m.out_features for m in layers
    )


@pytest.mark.parametrize("lora", [{"base": "nf4"}, {"base": "int4", "dora": True, "double_quantisation": True}])
def test_transposed_weights_are_those_of_their_linear_layers(lora: dict[str, Any]) -> None:
    """GPT-2's Conv1D: the same gradients as with the dequantised Conv1D, and blocks of scales along the inputs."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()
    weight = model.transformer.h[0].attn.c_attn.weight.detach().clone()  # [in, out]
    adapters.add_adapters(model, model.lm_head, Lora(rank=3, base_block=16, **lora), torch.float32)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    layers = [module for module in model.modules() if isinstance(module, FourBitLinear)]
    assert len(layers) == 8
    layer = layers[0]
    assert layer.codes.shape == (96, 16)
    assert layer.weight.shape == weight.shape
    assert float((layer.weight - weight).norm() / weight.norm()) < 0.2
    plain = compare_gradients(model)
    assert type(plain.transformer.h[0].attn.c_attn.base_layer).__name__ == "Conv1D"
    logits = plain(input_ids=IDS).logits
    adapters.merge_adapters(model)
    torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("values", [{"base": "nf5"}, {"base_block": 7}, {"double_quantisation": True}])
def test_bases_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(DloError, match=f"lora.{next(iter(values))} must be"):
        Lora(**values)


def test_a_block_that_does_not_fit_is_refused_before_weights_are_read() -> None:
    task = CausalLM(config={"model_type": "llama", **SIZES}, lora=Lora(base="nf4"))
    with pytest.raises(DloError, match=r"base_block must be even and divide the 96 .* set base_block: 32"):
        task.check(None)
