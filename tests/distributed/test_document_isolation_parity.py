"""Models whose documents are kept apart by changes to their modules train on two ranks as in one process."""

import warnings
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule

from dlo_framework.testing import Case, assert_parity
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.token_batches import VOCABULARY, Tokens

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": FSDPStrategy,
    **{f"zero{stage}": partial(ZeroStrategy, stage) for stage in (1, 2, 3)},
    "tp": partial(MeshStrategy, tp=2, dp_shard=1),
    "pp": partial(MeshStrategy, pp=2, dp_shard=1, micro_batches=2),
    "deepspeed2": partial(DeepSpeedBridge, stage=2),
    "deepspeed3": partial(DeepSpeedBridge, stage=3),
}


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
    found = cases("bamba", ("pp", "tp"), recompute=True) + cases("bart", ("fsdp",))
    assert_parity(build, found, steps=2, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bamba", "bloom", "bart", "qwen3_next", "rwkv"])
def test_every_strategy_is_one_process(kind: str) -> None:
    names = [name for name in STRATEGIES if kind != "rwkv" or name != "tp"]
    assert_parity(build, cases(kind, names) + cases(kind, ("fsdp", "pp"), recompute=True), steps=2, rtol=1e-4)
