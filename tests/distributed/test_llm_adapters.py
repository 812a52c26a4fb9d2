"""Low-rank adapters train on two ranks as in one process, under every strategy."""

from functools import partial
from typing import Any

import pytest

from dlo_framework.testing import Case, assert_parity
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import FAMILIES, Tokens

STRATEGIES: dict[str, Any] = {
    "tp": partial(MeshStrategy, tp=2, dp_shard=1),
    "tp, sequence": partial(MeshStrategy, tp=2, dp_shard=1, sequence_parallel=True),
    "pp": partial(MeshStrategy, pp=2, dp_shard=1, micro_batches=2),
    "cp": partial(MeshStrategy, cp=2, dp_shard=1),
    "fsdp": FSDPStrategy,
    "zero3": partial(ZeroStrategy, 3),
}
OTHERS: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": partial(ZeroStrategy, 1),
    "zero2": partial(ZeroStrategy, 2),
    "fsdp, offload": partial(FSDPStrategy, offload=True),
}
NF4: dict[str, Any] = {"base": "nf4", "base_block": 8}
DOUBLE = {"precision": "64-true"}


def build(family: str = "llama", micro_batches: int = 2, **lora: Any) -> tuple[CausalLM, Tokens]:
    config = {"model_type": family, **FAMILIES[family]}
    task = CausalLM(config=config, lora=Lora(rank=4, **lora), lr=1e-2, optimizer_args={"eps": 1e-4})
    return task, Tokens(micro_batches)


def cases(names: Any, **arguments: Any) -> list[Case]:
    trainer = {**DOUBLE, "accumulate_grad_batches": 2}
    return [Case({**STRATEGIES, **OTHERS}[name], arguments, trainer, f"{name}, {arguments}") for name in names]


def test_adapters_are_one_process() -> None:
    found = cases(("pp",)) + cases(("zero3",), dora=True) + cases(("tp",), **NF4, double_quantisation=True)
    assert_parity(build, found, steps=2, rtol=1e-7)


@pytest.mark.slow
def test_adapters_of_every_family_are_one_process_under_every_strategy() -> None:
    found = cases(STRATEGIES, dora=True)
    found += [case for family in ("qwen3", "gemma2", "gpt_neox", "gpt2") for case in cases(STRATEGIES, family=family)]
    found += cases(("tp", "pp"), family="gpt2", dora=True)
    found += cases(STRATEGIES, targets=["q_proj", "down_proj", "lm_head"])
    found += cases([*STRATEGIES, *OTHERS], **NF4, dora=True)
    found += cases(STRATEGIES, family="gpt2", **NF4)
    found += cases(STRATEGIES, family="gpt_neox", base="int4", base_block=8, targets=["query_key_value"])
    assert_parity(build, found, steps=4, rtol=1e-6)
