"""Texts for the tests of language models' data."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.step_tokens import AccumulationPlan, TextBatchSampler

TEXT = "the loss of a packed document equals its loss alone and no window sees another one twice"
WORDS = TEXT.split()
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def sentences(count: int, longest: int = 40, seed: int = 0) -> list[str]:
    """Returns texts of 1 to ``longest`` words, each with a number of its own."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(2, 1, count), 1, longest).astype(int)
    return [f"{n}: " + " ".join(generator.choice(WORDS, length)) for n, length in enumerate(lengths)]


def word_tokenizer(ids: dict[str, int], closes: bool = False):
    """Returns a tokenizer of some words, `<end>` among them; one that closes puts it behind each text itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(ids, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if closes:
        end = ("<end>", ids["<end>"])
        words.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[end])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<end>")


def lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sampler(world_size=1, rank=0, accumulate=1, size=40, lengths=None, **options) -> TextBatchSampler:
    """Returns a rank's sampler, of samples that have 1, 4, 9 targets and so on."""
    targets = np.arange(1, size + 1) ** 2
    return TextBatchSampler(
        size,
        count_targets=targets.__getitem__,
        lengths=lengths,
        accumulation=lambda: AccumulationPlan(accumulate, float("inf")),
        **{"batch_size": 8 // world_size, "shuffle": True, "drop_last": True, "rank": rank, "world_size": world_size}
        | options,
    )


def documents_in(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """Returns the ids and the labels of each document of a batch, padding left out."""
    found = []
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = [*torch.where(positions == 0)[0].tolist(), len(ids)]
        for first, past in pairwise(starts):
            assert positions[first:past].tolist() == list(range(past - first))
            real = (labels[first:past] != IGNORE_INDEX).nonzero()
            if len(real):
                past = first + int(real[-1]) + 1
                found.append((ids[first:past].tolist(), labels[first:past].tolist()))
    return found
