"""Low-rank adapters, frozen parts and 4-bit bases: what trains, what is refused; they and whole models on two ranks."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.errors import DloError
from dlo_framework.models.four_bit_linear import FourBitLinear
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language import adapters, tokenization
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.curricula_runs import texts
from support.strategies import named_cases
from support.texts import lines, sentences
from support.token_batches import FAMILIES, SMALL, Tokens

IDS = torch.arange(12).view(2, 6)


def make(family: str = "llama", **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4} if family == "gpt2" else SMALL
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **more})).eval()


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
    with pytest.raises(DloError, match=r"must match parameters of the model, got 'model.layer'; did you mean 'model.l"):
        adapters.freeze_parameters(model, ["model.layer"])
    with pytest.raises(DloError, match="freeze must leave a parameter to train"):
        adapters.freeze_parameters(model, ["model", "lm_head"])


# QLoRA: adapters beside 4-bit weights learn as beside the dequantised ones; what is refused; what an export holds


ROWS = torch.arange(24).view(2, 12)


def adapted(model: Any, std: float = 0.1, **lora: Any) -> Any:
    """Returns the model with adapters that change what it computes."""
    adapters.add_adapters(model, model.lm_head, Lora(**lora), torch.float32)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=std)
    return model


def compare_gradients(model: Any) -> Any:
    """Compares the gradients of the adapters with those beside dequantised weights; returns the model of these."""
    plain = copy.deepcopy(model)
    adapters.dequantise_base(plain)
    for each in (model, plain):
        each(input_ids=ROWS, labels=ROWS).loss.backward()
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
    model = adapted(make(hidden_size=64, intermediate_size=96), rank=3, base_block=32, **lora)
    assert sum(isinstance(module, FourBitLinear) for module in model.modules()) == 14
    compare_gradients(model)


@pytest.mark.parametrize("lora", [{"base": "nf4"}, {"base": "int4", "dora": True, "double_quantisation": True}])
def test_transposed_weights_are_those_of_their_linear_layers(lora: dict[str, Any]) -> None:
    """GPT-2's Conv1D: the same gradients as with the dequantised Conv1D, and blocks of scales along the inputs."""
    model = make("gpt2")
    weight = model.transformer.h[0].attn.c_attn.weight.detach().clone()  # [in, out]
    adapted(model, rank=3, base_block=16, **lora)
    layers = [module for module in model.modules() if isinstance(module, FourBitLinear)]
    assert len(layers) == 8
    layer = layers[0]
    assert layer.codes.shape == (96, 16)
    assert layer.weight.shape == weight.shape
    assert float((layer.weight - weight).norm() / weight.norm()) < 0.2
    plain = compare_gradients(model)
    assert type(plain.transformer.h[0].attn.c_attn.base_layer).__name__ == "Conv1D"
    logits = plain(input_ids=ROWS).logits
    adapters.merge_adapters(model)
    torch.testing.assert_close(model(input_ids=ROWS).logits, logits, rtol=1e-4, atol=1e-4)


def test_a_block_that_does_not_fit_is_refused_before_weights_are_read() -> None:
    task = CausalLM(config={"model_type": "llama", **SMALL, "intermediate_size": 96}, lora=Lora(base="nf4"))
    with pytest.raises(DloError, match=r"base_block must be even and divide the .* set base_block: 32"):
        task.check(None)


# --- low-rank adapters train on two ranks as in one process, under every strategy ------------------------------------


MOST = ("tp", "sp", "pp", "cp", "fsdp", "zero3")
ALL = (*MOST, "ddp", "zero1", "zero2", "fsdp_offload")
NF4: dict[str, Any] = {"base": "nf4", "base_block": 8}
RUN = {"precision": "64-true", "accumulate_grad_batches": 2}


def adapted_build(family: str = "llama", micro_batches: int = 2, **lora: Any) -> tuple[CausalLM, Tokens]:
    config = {"model_type": family, **FAMILIES[family]}
    task = CausalLM(config=config, lora=Lora(rank=4, **lora), lr=1e-2, optimizer_args={"eps": 1e-4})
    return task, Tokens(micro_batches)


def test_adapters_are_one_process() -> None:
    found = (
        named_cases(("pp",), RUN)
        + named_cases(("zero3",), RUN, dora=True)
        + named_cases(("tp",), RUN, **NF4, double_quantisation=True)
    )
    assert_parity(adapted_build, found, steps=2, rtol=1e-7)


@pytest.mark.slow
def test_adapters_of_every_family_are_one_process_under_every_strategy() -> None:
    found = named_cases(MOST, RUN, dora=True)
    found += [
        case for family in ("qwen3", "gemma2", "gpt_neox", "gpt2") for case in named_cases(MOST, RUN, family=family)
    ]
    found += named_cases(("tp", "pp"), RUN, family="gpt2", dora=True)
    found += named_cases(MOST, RUN, targets=["q_proj", "down_proj", "lm_head"])
    found += named_cases(ALL, RUN, **NF4, dora=True)
    found += named_cases(MOST, RUN, family="gpt2", **NF4)
    found += named_cases(MOST, RUN, family="gpt_neox", base="int4", base_block=8, targets=["query_key_value"])
    assert_parity(adapted_build, found, steps=4, rtol=1e-6)


# --- whole models: six families train on two ranks as one process does, whatever tokens each rank has ---------------


DATA = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def build(
    family: str = "llama",
    micro_batches: int = 1,
    with_count: bool = True,
    silent: bool = False,
    lora: int = 0,
    **options: Any,
) -> tuple[CausalLM, Tokens]:
    config = {"model_type": family, **FAMILIES[family]}
    # Without a larger eps, Adam makes whole steps of the rounding of gradients that cancel to nothing.
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, **options}
    task = CausalLM(config=config, lora=Lora(rank=lora) if lora else None, **more)
    return task, Tokens(micro_batches, with_count, silent)


#: Each family and each strategy; stage 3 and FSDP, which divide the weights, have tied ones too.
SOME = {"llama": "ddp", "qwen3": "zero3", "mistral": "zero1", "gemma2": "fsdp", "gpt_neox": "zero2", "gpt2": "zero3"}


def test_each_family_and_each_strategy_trains_as_one_process() -> None:
    found = [case for family, name in SOME.items() for case in named_cases([name], family=family)]
    assert set(SOME) == set(FAMILIES)
    assert set(SOME.values()) == set(DATA)
    assert_parity(build, found, steps=2, rtol=1e-5)


@pytest.mark.slow
def test_every_family_trains_under_every_strategy_as_one_process() -> None:
    assert_parity(build, [case for family in FAMILIES for case in named_cases(DATA, family=family)], steps=4, rtol=1e-5)


@pytest.mark.slow
def test_uneven_tokens_of_ranks_and_micro_batches_adapters_and_recomputation_are_one_process() -> None:
    found = named_cases(DATA, {"accumulate_grad_batches": 2}, micro_batches=2)
    found += named_cases(["ddp", "fsdp"], with_count=False)
    found += named_cases(DATA, silent=True)
    found += named_cases(DATA, family="qwen3", lora=4)
    found += named_cases(["ddp", "fsdp", "zero3"], recompute=True)
    found += named_cases(["fsdp", "zero3"], freeze=["model.embed_tokens", "model.layers.0"])
    # A head that is gathered when it is called, and not with the rest of the step.
    fsdp = partial(FSDPStrategy, units=["model.model.layers.*", "model.lm_head"])
    zero3 = partial(ZeroStrategy, 3, units=["model.lm_head", "model.model.layers.0"])
    found += [Case(each, {"silent": silent}) for each in (fsdp, zero3) for silent in (False, True)]
    assert_parity(build, found, steps=4, rtol=1e-5)


# --- TextData on two ranks: one of them tokenises, and the loss of a token is that of one process --------------------


def on_texts(folder: Path, packing: str) -> tuple[Any, Any]:
    write = tokenization.write_store

    def counted(*arguments: Any) -> None:
        with open(folder / "calls", "a") as file:
            file.write(f"{os.getpid()}\n")
        write(*arguments)

    tokenization.write_store = counted
    return texts(folder, data={"packing": packing, "long_samples": "truncate", "val_fraction": 0.0})


def test_two_ranks_train_on_the_tokens_of_one_process(tmp_path: Path) -> None:
    # Prompts of any length: batches differ much in their targets.
    rows = [{"prompt": text, "completion": f" {number}"} for number, text in enumerate(sentences(80, 30))]
    lines(tmp_path / "texts.jsonl", *rows, *({"text": text} for text in sentences(80, 30, seed=1)))
    found = named_cases(["ddp"], folder=tmp_path, packing="best_fit")
    found += named_cases(["ddp"], {"accumulate_grad_batches": 4}, folder=tmp_path, packing="none")
    assert_parity(on_texts, found, steps=6, rtol=1e-5)
    assert len((tmp_path / "calls").read_text().split()) == 1
