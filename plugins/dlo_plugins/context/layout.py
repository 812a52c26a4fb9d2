"""Which positions of a sequence a rank holds: two chunks, one from the head and one from the tail.

The Llama 3 Herd of Models. Grattafiori et al., 2024, arXiv 2407.21783, section 3.3.2. A causal sequence cut into as
many contiguous parts as ranks leaves the first rank almost nothing to compute, and the last almost all; of twice as
many chunks, rank r takes the one at place r from the head and that at place r from the tail, and all have the same
work. So they have in Striped Attention (Brandon et al., 2023, arXiv 2311.09431), which deals out single tokens instead,
and where every pair of ranks then needs a causal mask.

Shapes: B rows, L positions of the whole sequence, C chunks (two a rank).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.errors import DloError

#: The label of a position without a target.
_NO_TARGET = -100


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Returns the numbers of a rank's two chunks, in the order in which it holds them."""
    return rank, 2 * ranks - 1 - rank


def take_chunks(whole: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """Returns a rank's part of a tensor, in memory of its own.

    Args:
        whole: whose size along `dim` is a multiple of `2 * ranks`.
        rank: whose part it is.
        ranks: among which the sequence is shared.
        dim: of the sequence.
    """
    pieces = whole.chunk(2 * ranks, dim)
    return torch.cat([pieces[number] for number in chunks_of(rank, ranks)], dim)


def join_parts(parts: list[Tensor], dim: int = 1) -> Tensor:
    """Returns the whole tensor of the ranks' parts, in the order of ranks; the inverse of :func:`take_chunks`."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim)


def prepare(batch: Any, ranks: int) -> dict[str, Any]:
    """Returns a batch with positions, its sequence padded on the right to a multiple of `2 * ranks`.

    What is added has no target, is a document of its own, and its positions are 0, 1, 2, ... An `attention_mask` calls
    it padding.

    Args:
        batch: a dict with `input_ids` [B, L]; every other tensor of that shape belongs to the sequence.
        ranks: among which the sequence is shared.

    Raises:
        DloError: for a batch that is no such dict, and an attention mask of another shape.
    """
    if not isinstance(batch, dict) or not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].ndim != 2:
        given = f"keys {sorted(batch)}" if isinstance(batch, dict) else type(batch).__name__
        raise DloError(
            f"context parallelism shares a sequence of tokens: a batch is a dict with `input_ids` [B, L], given {given}"
        )
    batch = dict(batch)
    ids = batch["input_ids"]
    length = ids.shape[1]
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise DloError(
            f"context parallelism takes an attention mask of padding, {list(ids.shape)} as input_ids, given"
            f" {list(mask.shape)}; leave it out, and tell documents apart by position_ids that begin again at 0"
        )
    if batch.get("position_ids") is None:
        batch["position_ids"] = torch.arange(length, device=ids.device).expand(ids.shape)
    elif batch["position_ids"].ndim == 2 and len(batch["position_ids"]) == 1:
        batch["position_ids"] = batch["position_ids"].expand(ids.shape)
    missing = -length % (2 * ranks)
    if missing:
        for name, tensor in batch.items():
            if not in_sequence(tensor, ids):
                continue
            if name == "position_ids":
                more = torch.arange(missing, device=tensor.device, dtype=tensor.dtype).expand(len(tensor), -1)
                batch[name] = torch.cat([tensor, more], 1)
            else:
                batch[name] = F.pad(tensor, (0, missing), value=_NO_TARGET if name == "labels" else 0)
    return batch


def in_sequence(value: Any, ids: Tensor) -> bool:
    """Returns whether a batch's entry has a value for each token: its first two dims are those of `ids`."""
    return isinstance(value, Tensor) and value.shape[:2] == ids.shape
