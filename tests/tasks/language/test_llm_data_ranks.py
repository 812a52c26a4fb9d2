"""TextData on two ranks: one of them tokenises, and the loss of a token is that of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F

from dlo_framework.data import data_parallel_coordinates
from dlo_framework.testing import Case, assert_parity
from dlo_tasks.language import tokenization
from dlo_tasks.language.text_data import TextData

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
