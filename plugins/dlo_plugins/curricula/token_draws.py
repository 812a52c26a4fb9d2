"""Which tokens a block sees: random layer token drop.

Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers. Yao, Wu, Li,
Holmes, Rajbhandari, Zhang & He, 2022, arXiv 2211.11586. Departure: draws are a hash of (seed, step, block), the same
for all rows of a step, on all ranks and after a resume; the paper draws each batch's by a generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlo_framework.data.hashing import hash64
from dlo_framework.errors import DloError

_STREAM = 0x5444  # of the draws, among other hashes of the same seed
#: Dims of the tokens in arguments of blocks besides the hidden state, counted from the end.
_DIMS = {
    "position_ids": (-1,),
    "attention_mask": (-1, -2),
    "position_embeddings": (-2,),
    "cache_position": (-1,),
    "seq_idx": (-1,),
}
#: Bounds of the documents of all rows, which the selection moves.
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")


def kept_tokens(fraction: float, start: float, until: float, length: int, multiple: int) -> int:
    """Returns the number of tokens that a block sees.

    Args:
        fraction: Fraction of training, 0 to 1.
        start: Fraction of the tokens at the start, from which it grows linearly to 1.
        until: Fraction of training at which all tokens are seen.
        length: Number of tokens of a row.
        multiple: Multiple to which the number is rounded up.
    """
    share = start + (1 - start) * min(1.0, fraction / until)
    count = -(-int(np.ceil(share * length - 1e-9)) // multiple) * multiple
    return min(length, count)


def draw_tokens(length: int, count: int, always: int, step: int, block: int, seed: int) -> np.ndarray:
    """Returns the positions of the tokens that a block sees in a step, ascending, int64 `[count]`.

    Args:
        length: Number of tokens of a row.
        count: Number of tokens to choose.
        always: Number of tokens at the start of a row that are always chosen, such as class tokens.
        step: Number of optimizer steps before this one.
        block: Number of the block.
        seed: Seed of the draws.
    """
    order = np.argsort(hash64(np.arange(always, length), seed, step, block, _STREAM), kind="stable") + always
    return np.sort(np.concatenate([np.arange(always), order[: max(0, count - always)]]))


def select_arguments(kwargs: Mapping[str, Any], index: Tensor, length: int, rows: int, name: str) -> dict[str, Any]:
    """Returns a block's arguments by name for the chosen tokens.

    Args:
        kwargs: Arguments besides the hidden state.
        index: Positions of the tokens, int64 `[K]`.
        length: Number of tokens of a row.
        rows: Number of rows.
        name: Name of the block, for the message.

    Raises:
        DloError: If an argument has a dim of the tokens, and it is not known which.
    """
    found = dict(kwargs)
    for key, value in kwargs.items():
        if key in _BOUNDS and isinstance(value, Tensor):
            kept = torch.zeros(length, dtype=torch.int32, device=value.device)
            kept[index] = 1
            before = torch.cat([kept.new_zeros(1), kept.repeat(rows).cumsum(0, dtype=torch.int32)])
            found[key] = before[value.long()]
        elif isinstance(value, tuple):
            parts = [_select(key, part, index, length, name) for part in value]
            # A named tuple keeps its class.
            found[key] = type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        else:
            found[key] = _select(key, value, index, length, name)
    return found


def _select(key: str, value: Any, index: Tensor, length: int, name: str) -> Any:
    if value is None or isinstance(value, int | float | bool | str):
        return value
    if not isinstance(value, Tensor):
        if key == "past_key_values":
            return value
        raise DloError(
            f"TokenDrop: arguments of a block must be tensors, got {type(value).__name__} for '{key}' of '{name}';"
            f" leave the block out by skip: ['{name}']"
        )
    if value.ndim == 0 or value.numel() == 0:  # An empty mask says that there is none.
        return value
    dims = _DIMS.get(key)
    if dims is None:
        if length in value.shape:
            raise DloError(
                f"TokenDrop: it must be known which dim of a block's argument is that of the tokens, got '{key}' of"
                f" shape {list(value.shape)} for '{name}'; leave the block out by skip: ['{name}']"
            )
        return value
    if key == "attention_mask" and value.ndim == 2:
        dims = dims[:1]  # The other dim is that of the rows.
    for dim in dims:
        if value.ndim >= -dim and value.shape[dim] == length:
            value = value.index_select(dim, index)
    return value
