"""PreferenceLM trains on two ranks as in one process: each objective, each source of the reference, each strategy."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dlo_framework.testing import Case, assert_parity
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.preferences import build, write_pairs, write_tokenizer
from support.token_batches import FAMILIES

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": FSDPStrategy,
    **{f"zero{stage}": partial(ZeroStrategy, stage) for stage in (1, 2, 3)},
    "tp": partial(MeshStrategy, tp=2, dp_shard=1),
    "pp": partial(MeshStrategy, pp=2, dp_shard=1, micro_batches=2),
    "cp": partial(MeshStrategy, cp=2, dp_shard=1),
    "pp, cp": partial(MeshStrategy, pp=2, cp=2, dp_shard=1, micro_batches=2),
    "deepspeed2": partial(DeepSpeedBridge, stage=2),
    "deepspeed3": partial(DeepSpeedBridge, stage=3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with pairs, a tokenizer and a reference model."""
    path = tmp_path_factory.mktemp("preferences")
    write_pairs(path)
    write_tokenizer(path)
    torch.manual_seed(3)
    sizes = {**FAMILIES["llama"], "vocab_size": 32}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(path / "reference")
    return path


def cases(folder: Path, names: Any, trainer: dict[str, Any] | None = None, **arguments: Any) -> list[Case]:
    text = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return [
        Case(STRATEGIES[name], {"folder": str(folder), **arguments}, trainer or {}, f"{name}, {text}") for name in names
    ]


def test_strategies_are_one_process(folder: Path) -> None:
    found = cases(folder, ("cp",), objective="dpo", source="adapters")
    found += cases(folder, ("zero3", "pp"), objective="dpo", source="model")
    assert_parity(build, found, steps=2, rtol=1e-5)


@pytest.mark.slow
def test_stages_that_share_sequences_are_one_process(folder: Path) -> None:
    """On four ranks, where a second model's outputs are shards of sequences, on the last stage alone."""
    found = cases(folder, ["pp, cp"], objective="dpo", source="model")
    found += cases(folder, ["pp, cp"], objective="kto", source="model")
    found += cases(folder, ["pp, cp"], objective="ipo", source="adapters")
    assert_parity(build, found, steps=3, rtol=1e-5, world_size=4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_objective_and_reference_is_one_process_under_every_strategy(folder: Path) -> None:
    pairs = [name for name in STRATEGIES if name != "pp, cp"]
    everywhere = [name for name in pairs if name != "deepspeed2"]
    found = cases(folder, pairs, objective="dpo", source="adapters")
    found += cases(folder, everywhere, objective="dpo", source="model")
    found += cases(folder, everywhere, objective="ipo", source="model")
    found += cases(folder, everywhere, objective="orpo", packing="none")
    found += cases(folder, ("ddp", "fsdp", "zero3", "pp", "cp"), objective="kto", source="adapters")
    found += cases(folder, ("tp", "cp", "zero3"), objective="kto", source="model")
    found += cases(folder, ("ddp", "zero3", "pp"), {"accumulate_grad_batches": 2}, objective="dpo", source="model")
    found += cases(folder, ("fsdp", "zero3"), {"accumulate_grad_batches": 2}, objective="kto", source="adapters")
    assert_parity(build, found, steps=4, rtol=1e-5)
