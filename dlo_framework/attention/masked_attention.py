"""Attention under a mask by a kernel of choice, and under a dense mask for a cache of keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlo_framework.attention.attention_mask import AttentionMask, LocalHeads
from dlo_framework.attention.flex_blocks import attend_flex
from dlo_framework.attention.gathered_blocks import attend_blocks
from dlo_framework.attention.scored_attention import PLAIN_SCORES, Scores, scored_attention
from dlo_framework.errors import DloError

_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def masked_attention(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    documents: Tensor | None = None,
    *,
    heads: LocalHeads | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Returns attention under a mask, `[B, H, L, E]`.

    Args:
        kernel: Kernel, from :func:`~.attention_options.choose_kernel`.
        query: Queries, `[B, H, L, D]`.
        key: Keys, `[B, K, L, D]`; each head serves H / K consecutive heads of queries.
        value: Values, `[B, K, L, E]`.
        mask: Mask.
        documents: Number of the document of each position, int64 `[B, L]`; None for one document per row.
        heads: Heads of queries in these tensors; None for all of the model's.
        scale: Factor of scores; the width's inverse square root by default.
        dropout: Dropout rate of attention weights.
        scores: Soft cap and sinks of the scores, which `blocks` and `sdpa` compute.

    Raises:
        DloError: If the kernel keeps no documents apart.
    """
    if kernel == "blocks":
        return attend_blocks(
            query, key, value, mask, documents, heads=heads, scale=scale, dropout=dropout, scores=scores
        )
    if kernel == "flex":
        return attend_flex(query, key, value, mask, documents, heads=heads, scale=scale)
    if documents is not None and kernel in _BACKENDS:
        raise DloError(
            f"attention.kernel must keep packed documents apart, got {kernel}, which takes no mask; set kernel: varlen"
        )
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    seen = None
    if documents is not None or not mask.pattern.is_dense or not scores.is_plain:
        places = torch.arange(query.shape[2], device=query.device)
        seen = mask.visible(places, places, heads, query.shape[2])[None]
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    causal = mask.causal and seen is None
    if kernel in _BACKENDS:
        with sdpa_kernel([_BACKENDS[kernel]]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, dropout_p=dropout, scale=scale)
    if causal:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout, scale=scale)
    return scored_attention(query, key, value, seen, scores, scale=scale, dropout=dropout)


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    seen: Tensor | None,
    *,
    heads: LocalHeads | None = None,
    scale: float | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Returns attention of the last positions to all keys of a cache, `[B, H, q, E]`, under a dense mask.

    Args:
        query: Queries of the last positions, `[B, H, q, D]`.
        key: Keys, `[B, K, k, D]`.
        value: Values, `[B, K, k, E]`.
        mask: Mask.
        seen: Causal mask with the padding, bool `[B, 1, q, k]`; None without padding. Padding is on the left, and the
            pattern begins after it.
        heads: Heads of queries in these tensors; None for all of the model's.
        scale: Factor of scores.
        scores: Soft cap and sinks of the scores.
    """
    queries, keys = query.shape[2], key.shape[2]
    places = torch.arange(keys, device=query.device)
    last = places[keys - queries :]
    if seen is None:
        allowed = mask.visible(last, places, heads, keys)[None]
    else:
        made = []
        for first in seen[:, 0, -1, :keys].to(torch.int8).argmax(-1).tolist():  # Number of positions of padding
            inside = (places - first).clamp(min=0)
            visible = mask.visible(inside[keys - queries :], inside, heads, keys - first)
            # A position of the padding sees itself: its output is not used.
            visible = (visible & (places >= first)) | (last[:, None] == places)
            made.append(visible.expand(query.shape[1], -1, -1))
        allowed = torch.stack(made)
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return scored_attention(query, key, value, allowed, scores, scale=scale)
