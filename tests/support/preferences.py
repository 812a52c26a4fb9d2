"""Preferences for tests: a small model's sizes, and data of words of very different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dlo_framework.frozen_model import FrozenModel
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.preference_data import PreferenceData
from dlo_tasks.language.preference_lm import PreferenceLM
from support.texts import WORDS, lines, word_tokenizer
from support.token_batches import FAMILIES

SEQ_LEN = 12


def write_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer of some words, and returns its folder."""
    ids = {word: number for number, word in enumerate(["<end>", *dict.fromkeys(WORDS)])}
    word_tokenizer(ids).save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def write_pairs(folder: Path, count: int = 48, seed: int = 0) -> Path:
    """Writes pairs of random words, of which some are long and some short."""
    draw = np.random.default_rng(seed)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choice(WORDS, int(draw.integers(least, most + 1))))

    rows = [{"prompt": words(1, 6), "chosen": words(1, 9) + " the", "rejected": words(1, 9)} for _ in range(count)]
    return lines(folder / "pairs.jsonl", *rows)


def build(
    folder: str,
    objective: str = "dpo",
    source: str = "",
    packing: str = "best_fit",
    family: str = "llama",
    rows: int = 4,
    **options: Any,
) -> tuple[PreferenceLM, PreferenceData]:
    """Returns a task and its data.

    Args:
        folder: Folder with a tokenizer and pairs.
        objective: Loss.
        source: Reference: `adapters` or `model`; none for objectives without one.
        packing: Layout of the pairs.
        family: Family of the model.
        rows: Rows of a batch.
        **options: Further arguments of the task.
    """
    config = {"model_type": family, **FAMILIES[family], "vocab_size": 32}
    arguments: dict[str, Any] = {"lr": 3e-2, "optimizer_args": {"eps": 1e-4}, **options}
    if source == "adapters":
        arguments["lora"] = Lora(rank=4)
    if source == "model":
        arguments["reference"] = FrozenModel(task=CausalLM(model=f"{folder}/reference"))
    task = PreferenceLM(objective, config=config, **arguments)  # type: ignore[arg-type]
    return task, data(folder, unpaired=objective == "kto", packing=packing, batch_size=rows)


def data(folder: str, **options: Any) -> PreferenceData:
    """Returns data of the folder's pairs."""
    found = {"train_files": f"{folder}/pairs.jsonl", "tokenizer": f"{folder}/tokenizer", "cache_dir": f"{folder}/cache"}
    return PreferenceData(**{**found, "seq_len": SEQ_LEN, "val_fraction": 0.0, "batch_size": 4, **options})
