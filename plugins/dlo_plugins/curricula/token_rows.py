"""Shorter rows of token batches: cut into several rows, or truncated.

Batches are dicts of `[B, N]` tensors: `input_ids`; `labels`, the id of the next token; `position_ids`, which restart
where a document begins; `attention_mask` of padded rows. Other entries have no dim of N.

- SkyLadder: Better and Faster Pretraining via Context Window Scheduling. Zhu et al., 2025, arXiv 2503.15450: attention
  is limited to windows of the sequence, which is what rows of the windows' length compute.
- The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models. Li, Zhang & He, 2021,
  arXiv 2108.06084 (DeepSpeed's curriculum): sequences are truncated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError

#: Entries of a batch with one value per token.
TOKEN_KEYS = ("input_ids", "labels", "position_ids", "attention_mask")
#: Entries that count the targets of the optimizer step, which a truncation changes.
_COUNTS = ("tokens_in_step",)


def fitting_length(length: int, full: int, multiple: int) -> int:
    """Returns the largest divisor of a row's length that is a multiple of a number, and at most ``length``.

    Args:
        length: Wanted length.
        full: Length of the rows.
        multiple: Number that the result must be a multiple of; if none is small enough, the smallest such divisor.
    """
    fitting = [full // parts for parts in range(1, full + 1) if full % parts == 0 and full // parts % multiple == 0]
    if not fitting:
        return full
    return max((size for size in fitting if size <= length), default=min(fitting))


def check_tokens(batch: Any, what: str) -> int:
    """Returns the length of the rows of a batch.

    Args:
        batch: Batch.
        what: Name of the callback, for the message.

    Raises:
        DloError: If it is not a batch of tokens, or has other values per token.
    """
    if not isinstance(batch, dict) or not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].ndim != 2:
        raise DloError(
            f"{what}: batches must be dicts with input_ids [B, N], got {type(batch).__name__}; use it with language"
            " models, or leave it out"
        )
    length = batch["input_ids"].shape[1]
    others = [
        key for key, value in batch.items() if key not in TOKEN_KEYS and isinstance(value, Tensor) and value.ndim > 0
    ]
    if others:
        raise DloError(
            f"{what}: batches must have values per token in {', '.join(TOKEN_KEYS)} alone, got '{others[0]}', which"
            " belongs to full rows; leave the callback out"
        )
    return int(length)


def split_rows(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """Returns a batch whose rows are cut into rows of a length that divides theirs.

    All tokens and targets stay, in their order. A document that is cut begins again at position 0 in the next row.

    Args:
        batch: Batch of rows `[B, N]`.
        length: Length of the new rows.
    """
    found = {
        key: value.reshape(-1, length) if key in TOKEN_KEYS else value for key, value in batch.items()
    }  # [B * N / length, length]
    positions = found.get("position_ids")
    if positions is not None:
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[:, 1:] = positions.diff(dim=1) != 1
        places = torch.arange(length, device=positions.device).expand_as(positions)
        found["position_ids"] = places - torch.where(begins, places, 0).cummax(dim=1).values
    return found


def truncate_rows(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """Returns a batch with the first tokens of each row, without the number of targets of the step.

    Args:
        batch: Batch of rows `[B, N]`.
        length: Length of the new rows.
    """
    kept = {key: value for key, value in batch.items() if key not in _COUNTS}
    return {key: value[:, :length].contiguous() if key in TOKEN_KEYS else value for key, value in kept.items()}
