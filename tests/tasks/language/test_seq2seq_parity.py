"""Encoder-decoder models train on two ranks as in one process."""

from typing import Any

import pytest

from dlo_framework.testing import Case, assert_parity
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from support.seq2seq import FAMILIES, Pairs, seq2seq_config
from support.strategies import STRATEGIES

DATA = ("ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "deepspeed_1", "deepspeed_2", "deepspeed_3")


def build(family: str, lora: int = 0, **options: Any) -> tuple[Seq2SeqLM, Pairs]:
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, **options}
    return Seq2SeqLM(config=seq2seq_config(family), lora=Lora(rank=lora) if lora else None, **more), Pairs(1)


def cases(family: str, names: Any, trainer: dict[str, Any] | None = None, **options: Any) -> list[Case]:
    arguments = {"family": family, **options}
    return [Case(STRATEGIES[name], arguments, trainer or {}, f"{name}, {arguments}") for name in names]


def test_strategies_are_one_process() -> None:
    """Of each way to divide weights one, in double precision, with tied embeddings and biases of positions."""
    double = {"precision": "64-true"}
    found = cases("t5", ("zero3", "tp"), double) + cases("bart", ("fsdp",), double)
    assert_parity(build, found, steps=2, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_is_one_process(family: str) -> None:
    found = cases(family, DATA) + cases(family, ("fsdp", "zero3", "tp"), recompute=True)
    found += cases(family, ("ddp", "fsdp", "zero3"), lora=4)
    assert_parity(build, found, steps=3, rtol=1e-4)
