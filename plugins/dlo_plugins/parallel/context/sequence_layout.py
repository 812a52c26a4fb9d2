"""Layout of a sequence over ranks: each rank holds two chunks, one from the head and one from the tail.

The Llama 3 Herd of Models. Grattafiori et al., 2024, arXiv 2407.21783, section 3.3.2. If each rank had one contiguous
slice of a causal sequence, the first rank would have almost nothing to compute, and the last almost everything. With
two chunks for each rank, rank r holds the r-th chunk from the head and the r-th from the tail, and all ranks have the
same work. Striped Attention (Brandon et al., 2023, arXiv 2311.09431) balances the work too, by interleaving single
tokens, but then every pair of ranks needs a causal mask.

Shapes: B rows, L positions of the full sequence, C chunks (two for each rank).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.errors import DloError

#: Label of a position without a target.
_NO_TARGET = -100


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Returns the numbers of a rank's two chunks, in the order in which it holds them."""
    return rank, 2 * ranks - 1 - rank


def shard_sequence(whole: Tensor, rank: int, ranks: int, dim: int = 1) -> Tensor:
    """Returns a copy of a rank's shard of a tensor.

    Args:
        whole: Full tensor; its size along `dim` is a multiple of `2 * ranks`.
        rank: Rank of the shard.
        ranks: Number of ranks that share the sequence.
        dim: Dimension of the sequence.
    """
    pieces = whole.chunk(2 * ranks, dim)
    return torch.cat([pieces[number] for number in chunks_of(rank, ranks)], dim)


def concat_shards(parts: list[Tensor], dim: int = 1) -> Tensor:
    """Returns the full tensor from the shards in the order of ranks; the inverse of :func:`shard_sequence`."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim)


def pad_batch(batch: Any, ranks: int) -> dict[str, Any]:
    """Returns a batch with positions, its sequence padded on the right to a multiple of `2 * ranks`.

    The padding has no target, is a document of its own, and has positions 0, 1, 2, ... An `attention_mask` marks it as
    padding.

    Args:
        batch: Batch: a dict with `input_ids` [B, L]; all other tensors of this shape belong to the sequence.
        ranks: Number of ranks that share the sequence.

    Raises:
        DloError: If the batch is not such a dict, or its attention mask has another shape.
    """
    if not isinstance(batch, dict) or not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].ndim != 2:
        got = f"keys {sorted(batch)}" if isinstance(batch, dict) else type(batch).__name__
        raise DloError(
            f"a batch must be a dict with `input_ids` [B, L] for context parallelism, got {got}; return one from the"
            " loader, or set cp=1"
        )
    batch = dict(batch)
    ids = batch["input_ids"]
    length = ids.shape[1]
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise DloError(
            f"attention_mask must have the shape {list(ids.shape)} of input_ids for context parallelism, got"
            f" {list(mask.shape)}; leave it out, and separate documents by position_ids that begin again at 0"
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


def continued_positions(batch: dict[str, Any], ids: Tensor) -> Tensor:
    """Returns the positions of the full sequence, [B, L]; those of the padding of :func:`pad_batch` go on counting.

    Args:
        batch: Batch before it was padded.
        ids: Tokens of the padded batch, [B, L].
    """
    given = batch.get("position_ids")
    index = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if given is None or given.ndim != 2:
        return index
    own = given.expand(len(ids), -1)
    more = own[:, -1:] + torch.arange(1, 1 + ids.shape[1] - own.shape[1], device=ids.device)
    return torch.cat([own, more], 1)


def in_sequence(value: Any, ids: Tensor) -> bool:
    """Returns whether a batch's entry has a value for each token: its first two dims are those of `ids`."""
    return isinstance(value, Tensor) and value.shape[:2] == ids.shape
