"""Models whose documents are kept apart by changes to their modules train on two ranks as in one process."""

import warnings
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule

from dlo_framework.testing import Case, assert_parity
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.strategies import STRATEGIES
from support.token_batches import VOCABULARY, Tokens


def build(kind: str, recompute: bool = False) -> tuple[CausalLM, LightningDataModule]:
    warnings.filterwarnings("ignore")
    config = tiny(kind, dropout=False) | {"vocab_size": VOCABULARY}
    options: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "schedule": "constant", "weight_decay": 0.0}
    unused = [f"model.decoder.layers.*.encoder_attn{part}" for part in ("", "_layer_norm")] if kind == "bart" else None
    return CausalLM(config=config, recompute=recompute, freeze=unused, **options), Tokens(1)


def cases(kind: str, names: Any, **arguments: Any) -> list[Case]:
    return [Case(STRATEGIES[name], {"kind": kind, **arguments}, name=f"{kind}, {name}, {arguments}") for name in names]


@pytest.mark.filterwarnings("ignore")
def test_strategies_are_one_process() -> None:
    """Bamba has state-space layers and attention; Bloom a bias of positions; BART a table of them."""
    found = cases("bamba", ("tp",), recompute=True) + cases("bart", ("fsdp",))
    assert_parity(build, found, steps=2, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bamba", "bloom", "bart", "qwen3_next", "rwkv"])
def test_every_strategy_is_one_process(kind: str) -> None:
    names = ["ddp", "fsdp", "zero1", "zero2", "zero3", "pp", "deepspeed_2", "deepspeed_3"]
    names += ["tp"] if kind != "rwkv" else []
    assert_parity(build, cases(kind, names) + cases(kind, ("fsdp", "pp"), recompute=True), steps=2, rtol=1e-4)
