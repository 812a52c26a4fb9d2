"""Language models of six families train on two ranks as one process does, whatever tokens each rank happens to have."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlo_framework.testing import Case, assert_parity
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language import tokenization
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.curricula_runs import texts
from support.strategies import named_cases
from support.texts import lines, sentences
from support.token_batches import FAMILIES, Tokens

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
