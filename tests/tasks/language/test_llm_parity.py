"""Language models of six families train on two ranks as one process does, whatever tokens each rank happens to have."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F

from dlo_framework.data import data_parallel_coordinates
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language import tokenization
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.text_data import TextData
from support.strategies import STRATEGIES
from support.token_batches import FAMILIES, Tokens

DATA = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def cases(names: Iterable[str] = DATA, trainer: dict[str, Any] | None = None, **arguments: Any) -> list[Case]:
    text = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return [Case(STRATEGIES[name], arguments, trainer or {}, f"{name}, {text}") for name in names]


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
    found = [case for family, name in SOME.items() for case in cases([name], family=family)]
    assert set(SOME) == set(FAMILIES)
    assert set(SOME.values()) == set(DATA)
    assert_parity(build, found, steps=2, rtol=1e-5)


@pytest.mark.slow
def test_every_family_trains_under_every_strategy_as_one_process() -> None:
    assert_parity(build, [case for family in FAMILIES for case in cases(family=family)], steps=4, rtol=1e-5)


@pytest.mark.slow
def test_uneven_tokens_of_ranks_and_micro_batches_adapters_and_recomputation_are_one_process() -> None:
    found = cases(trainer={"accumulate_grad_batches": 2}, micro_batches=2)
    found += cases(["ddp", "fsdp"], with_count=False)
    found += cases(silent=True)
    found += cases(family="qwen3", lora=4)
    found += cases(["ddp", "fsdp", "zero3"], recompute=True)
    found += cases(["fsdp", "zero3"], freeze=["model.embed_tokens", "model.layers.0"])
    # A head that is gathered when it is called, and not with the rest of the step.
    for number, gathering in enumerate(
        (
            partial(FSDPStrategy, units=["model.model.layers.*", "model.lm_head"]),
            partial(ZeroStrategy, 3, units=["model.lm_head", "model.model.layers.0"]),
        )
    ):
        found += [Case(gathering, {"silent": silent}, name=f"head a unit, {number}") for silent in (False, True)]
    assert_parity(build, found, steps=4, rtol=1e-5)


# --- TextData on two ranks: one of them tokenises, and the loss of a token is that of one process --------------------


WORDS = ["the", "loss", "of", "a", "token", "is", "the", "same", "on", "any", "number", "of", "ranks"]


class Bigrams(LightningModule):
    """The smallest language model: the next token from this one. Its loss is the mean over the step's targets."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Embedding(320, 320)

    def training_step(self, batch, batch_idx):
        total = F.cross_entropy(
            self.scores(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        ranks = data_parallel_coordinates(self.trainer)[1]
        return total * ranks * int(self.trainer.accumulate_grad_batches) / batch["tokens_in_step"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


def train_on(folder: str, packing: str) -> tuple[LightningModule, Any]:
    write = tokenization.write_store

    def counted(*arguments: Any) -> None:
        with open(f"{folder}/calls", "a") as file:
            file.write(f"{os.getpid()}\n")
        write(*arguments)

    tokenization.write_store = counted
    data = TextData(
        train_files=f"{folder}/texts.jsonl",
        tokenizer=f"{folder}/model",
        seq_len=40,
        batch_size=4,
        packing=packing,
        long_samples="truncate",
        val_fraction=0.0,
        cache_dir=f"{folder}/cache",
    )
    return Bigrams(), data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from dlo_tasks.language.tokenizer import embedded_tokenizer

    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS, generator.integers(2, 30))) for _ in range(80)]
    # Prompts of any length: batches differ much in their targets.
    rows = [{"prompt": text, "completion": f" {number}"} for number, text in enumerate(texts[::2])]
    rows += [{"text": text} for text in texts[1::2]]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    embedded_tokenizer([file], 300, tmp_path).save_pretrained(tmp_path / "model")
    return tmp_path


def test_two_ranks_train_on_the_tokens_of_one_process(folder: Path) -> None:
    cases = [
        Case("ddp", {"folder": str(folder), "packing": packing}, {"accumulate_grad_batches": accumulate})
        for packing in ("best_fit", "none")
        for accumulate in (1, 4)
    ]
    assert_parity(train_on, cases, steps=8, rtol=1e-5)
    calls = (folder / "calls").read_text().split()
    assert len(calls) == 1
