"""Language models' sizes for tests, and batches of random tokens in packed documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from dlo_framework.data import ResumableDataModule, data_parallel_coordinates
from dlo_tasks.language import language_models

VOCABULARY, LENGTH, ROWS = 96, 24, 4
SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {**GROUPED, "sliding_window": 8},
    "gemma2": {
        **GROUPED,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 8,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 5.0,
    },
    "gpt_neox": SIZES,
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


#: Positions of rows of documents, by what is in them.
PLACES = {
    "several documents a row": [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]],
    "one in one of the rows": [[0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 2, 3, 4, 5, 6]],
    "one a row": [[*range(8)]] * 2,
    "one row": [[0, 1, 2, 0, 1, 0, 1, 2]],
    "later parts of documents": [[5, 6, 7, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 8, 9]],
}


def built_model(config: dict[str, Any], dtype: torch.dtype | None = torch.float32) -> Any:
    """Returns the model of a config, as a task builds it."""
    settings = language_models.read_config(None, config)
    return language_models.build_model(None, settings, dtype=dtype, attention=None)


class Batches(IterableDataset):
    """Batches that are there already; no map-style dataset, whose order Lightning would change."""

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


class Tokens(ResumableDataModule):
    """Random tokens: rows of documents packed together, of which very different numbers are to be predicted."""

    def __init__(
        self,
        micro_batches: int,
        with_count: bool = True,
        silent: bool = False,
        rows: int = ROWS,
        steps: int = 8,
        length: int = LENGTH,
    ) -> None:
        super().__init__(batch_size=rows)
        self.micro_batches, self.with_count, self.silent = micro_batches, with_count, silent
        self.rows, self.steps, self.length = rows, steps, length

    def make_batch(self, rows: int, draw: torch.Generator, length: int) -> dict[str, Tensor]:
        return packed_rows(rows, draw, length)

    def train_dataloader(self) -> DataLoader:
        rank, world_size = data_parallel_coordinates(self.trainer)
        mine = slice(rank * self.rows // world_size, (rank + 1) * self.rows // world_size)
        draw = torch.Generator().manual_seed(5)
        batches = []
        for _ in range(self.steps):
            step = [self.make_batch(self.rows, draw, self.length) for _ in range(self.micro_batches)]
            if self.silent:  # The last rank has nothing to predict.
                for batch in step:
                    batch["labels"][self.rows // 2 :] = -100
            total = torch.stack([(batch["labels"] != -100).sum() for batch in step]).sum()
            for batch in step:
                part = {name: value[mine] for name, value in batch.items()}
                batches.append(part | ({"tokens_in_step": total} if self.with_count else {}))
        return DataLoader(Batches(batches), batch_size=None)


def packed_rows(rows: int, draw: torch.Generator, length: int = LENGTH) -> dict[str, Tensor]:
    """A micro-batch of all ranks: each row has two documents, and a prompt of its own length without targets."""
    ids = torch.randint(VOCABULARY, (rows, length + 1), generator=draw)
    cuts = torch.randint(2, length - 2, (rows, 1), generator=draw)
    prompts = torch.randint(0, length, (rows, 1), generator=draw)
    place = torch.arange(length).expand(rows, length)
    labels = ids[:, 1:].masked_fill((place < prompts) | (place == cuts - 1), -100)
    return {
        "input_ids": ids[:, :-1].clone(),
        "labels": labels,
        "position_ids": torch.where(place < cuts, place, place - cuts),
    }
