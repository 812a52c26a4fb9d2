"""Low-rank adapters train on two ranks as in one process, under every strategy."""

from typing import Any

import pytest

from dlo_framework.testing import Case, assert_parity
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.strategies import STRATEGIES
from support.token_batches import FAMILIES, Tokens

MOST = ("tp", "sp", "pp", "cp", "fsdp", "zero3")
ALL = (*MOST, "ddp", "zero1", "zero2", "fsdp_offload")
NF4: dict[str, Any] = {"base": "nf4", "base_block": 8}
DOUBLE = {"precision": "64-true"}


def build(family: str = "llama", micro_batches: int = 2, **lora: Any) -> tuple[CausalLM, Tokens]:
    config = {"model_type": family, **FAMILIES[family]}
    task = CausalLM(config=config, lora=Lora(rank=4, **lora), lr=1e-2, optimizer_args={"eps": 1e-4})
    return task, Tokens(micro_batches)


def cases(names: Any, **arguments: Any) -> list[Case]:
    trainer = {**DOUBLE, "accumulate_grad_batches": 2}
    return [Case(STRATEGIES[name], arguments, trainer, f"{name}, {arguments}") for name in names]


def test_adapters_are_one_process() -> None:
    found = cases(("pp",)) + cases(("zero3",), dora=True) + cases(("tp",), **NF4, double_quantisation=True)
    assert_parity(build, found, steps=2, rtol=1e-7)


@pytest.mark.slow
def test_adapters_of_every_family_are_one_process_under_every_strategy() -> None:
    found = cases(MOST, dora=True)
    found += [case for family in ("qwen3", "gemma2", "gpt_neox", "gpt2") for case in cases(MOST, family=family)]
    found += cases(("tp", "pp"), family="gpt2", dora=True)
    found += cases(MOST, targets=["q_proj", "down_proj", "lm_head"])
    found += cases(ALL, **NF4, dora=True)
    found += cases(MOST, family="gpt2", **NF4)
    found += cases(MOST, family="gpt_neox", base="int4", base_block=8, targets=["query_key_value"])
    assert_parity(build, found, steps=4, rtol=1e-6)
