"""Batches of a model's own completions: prompts from a batch of text, and a batch that trains on what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlo_tasks.llm.batches import IGNORE_INDEX


def find_prompts(batch: Any, prompt_tokens: int | None) -> list[list[int]]:
    """Returns the prompt of each row of a batch, at least one token.

    Args:
        batch: Batch with `input_ids` and `labels`, `[B, L]`, and maybe an `attention_mask`.
        prompt_tokens: Number of tokens of a prompt; None for the tokens before a row's first target. A row of padding
            alone has its first token as the prompt.
    """
    ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    mask = batch.get("attention_mask")
    masks = [[1] * len(row) for row in ids] if mask is None else mask.tolist()
    found = []
    for row, targets, kept in zip(ids, labels, masks, strict=True):
        length = prompt_tokens
        if length is None:  # The label at a position is the next token.
            length = 1 + next((place for place, target in enumerate(targets) if target != IGNORE_INDEX), 0)
        begin = next((place for place, is_token in enumerate(kept) if is_token), 0)
        end = max(begin + 1, length if prompt_tokens is None else begin + length)
        found.append(row[begin:end])
    return found


def draw_for_rows(batch: Any, count: int, seed: int) -> Tensor:
    """Returns uniform random numbers in [0, 1) for each row of a batch, `[B, count]`, float64.

    They depend on the seed and on the row's tokens and targets, not on its place: a row has the same on any rank and in
    any batch.

    Args:
        batch: Batch with `input_ids` and `labels`, `[B, L]`, and maybe an `attention_mask`.
        count: Number of random numbers of a row.
        seed: Seed.
    """
    labels = batch["labels"].tolist()
    rows = []
    for prompt, targets in zip(find_prompts(batch, None), labels, strict=True):
        content = np.array([*prompt, -1, *(target for target in targets if target != IGNORE_INDEX)], dtype=np.int64)
        key = int.from_bytes(hashlib.blake2b(content.tobytes(), digest_size=16).digest(), "little")
        rows.append(np.random.default_rng([seed, key]).random(count))
    return torch.from_numpy(np.stack(rows))


def join_completions(
    prompts: Sequence[Sequence[int]],
    written: Sequence[Sequence[int]],
    ends: Collection[int],
    device: torch.device,
    multiple: int = 1,
) -> dict[str, Tensor]:
    """Returns a batch of prompts with their completions, padded on the right; its targets are the completions.

    Padding is after all tokens of its row, which do not see it, so that no mask is needed.

    Args:
        prompts: Token ids of the prompts.
        written: Token ids of the completions, padded after the first of `ends`.
        ends: Tokens that end a completion.
        device: Device of the batch.
        multiple: Multiple to which rows are padded.
    """
    rows, targets = [], []
    for prompt, completion in zip(prompts, written, strict=True):
        stop = next((place for place, token in enumerate(completion) if token in ends), len(completion) - 1)
        tokens = [*prompt, *completion[: stop + 1]]
        rows.append(tokens[:-1])
        targets.append([IGNORE_INDEX] * (len(prompt) - 1) + tokens[len(prompt) :])
    longest = -(-max(map(len, rows)) // multiple) * multiple
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    labels = [row + [IGNORE_INDEX] * (longest - len(row)) for row in targets]
    positions = torch.arange(longest, device=device).expand(len(rows), -1).contiguous()
    return {"input_ids": ids, "labels": torch.tensor(labels, device=device), "position_ids": positions}
