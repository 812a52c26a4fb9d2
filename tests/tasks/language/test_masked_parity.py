"""Models that predict masked tokens train on two ranks as one process does, packed and padded, in double precision."""

from typing import Any

import pytest

from dlo_framework.testing import Case, assert_parity
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.masked_data import MaskedTextData
from dlo_tasks.language.masked_lm import MaskedLM
from support.causal_types import MASKED_TYPES, tiny_masked
from support.strategies import STRATEGIES

DOUBLE = {"precision": "64-true"}


def build(kind: str, packing: str = "best_fit", lora: int = 0, **options: Any) -> tuple[MaskedLM, MaskedTextData]:
    config = tiny_masked(kind, dropout=False) | {"vocab_size": 300, "pad_token_id": 1}
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, **options}
    task = MaskedLM(config=config, lora=Lora(rank=lora) if lora else None, **more)
    data = MaskedTextData(seq_len=32, batch_size=4, vocab_size=300, corpus_bytes=60_000, packing=packing)
    return task, data


def cases(strategies: tuple[str, ...], **arguments: Any) -> list[Case]:
    text = ", ".join(map(str, arguments.values()))
    single = [name for name in strategies if name.startswith("deepspeed")]  # It has no double precision.
    return [Case(STRATEGIES[n], arguments, {} if n in single else DOUBLE, f"{n}, {text}") for n in strategies]


def test_masked_tokens_are_learned_on_two_ranks_as_in_one_process() -> None:
    found = cases(("zero3", "tp", "pp"), kind="bert")
    found += cases(("fsdp", "tp"), kind="modernbert")
    found += cases(("ddp",), kind="deberta-v2", packing="none")
    assert_parity(build, found, steps=2, rtol=1e-9)


DATA = ("ddp", "zero1", "zero2", "zero3", "fsdp", "tp", "pp", "deepspeed_1", "deepspeed_2", "deepspeed_3")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_every_strategy_learns_masked_tokens_as_one_process(kind: str) -> None:
    found = cases(DATA, kind=kind) + cases(("fsdp", "zero3", "pp"), kind=kind, recompute=True)
    found += cases(("fsdp", "zero3", "tp"), kind=kind, lora=4)
    assert_parity(build, found, steps=2, rtol=1e-4)


@pytest.mark.slow
def test_masked_tokens_are_learned_on_four_ranks_as_in_one_process() -> None:
    found = cases(("zero3", "fsdp"), kind="bert") + cases(("copies x pp",), kind="modernbert")
    assert_parity(build, found, world_size=4, steps=2, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MASKED_TYPES)
def test_every_type_trains_under_tensor_and_pipeline_parallelism(kind: str) -> None:
    assert_parity(build, cases(("tp", "pp"), kind=kind, packing="none"), steps=2, rtol=1e-5)
