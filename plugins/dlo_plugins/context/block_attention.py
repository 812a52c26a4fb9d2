"""Attention of a block of queries to a block of keys, with the log-sum-exp by which blocks are merged.

A fused kernel computes it if one fits. Otherwise (soft-capped scores, dropout, values of another width than keys, other
devices) a kernel written in torch computes the same, some queries at a time.

Shapes: B rows, H heads of queries, K heads of keys and values, S queries, T keys, D and E widths of keys and values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlo_plugins.context.fused import Block, Kernel, Result, kernel_for

#: Largest number of scores that the torch kernel keeps at a time.
_SCORES = 2**24


def forward(block: Block) -> tuple[Tensor, Tensor]:
    """Returns a block's output [B, H, S, E], and the log of the sum of its exponentials [B, H, S].

    A query that sees no key gets zeros, and minus infinity.

    Args:
        block: Block, with K heads of keys and values; each serves H / K consecutive heads of queries.
    """
    kernel = _kernel(block)
    out, lse, *_ = (_torch_forward if kernel is None else kernel.forward)(_with_heads(block, kernel))
    if block.mask is not None:
        out, lse = out.masked_fill(block.mask.blind[..., None], 0.0), lse.masked_fill(block.mask.blind, -math.inf)
    return out, lse


def backward(block: Block, result: Result) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a block's contribution to the gradients of q, k and v, in their shapes.

    Args:
        block: Block of the forward.
        result: Gradient of the output, with the output and the log-sum-exp, merged over all blocks.
    """
    heads, kernel = block.k.shape[1], _kernel(block)
    dq, dk, dv, *_ = (_torch_backward if kernel is None else kernel.backward)(_with_heads(block, kernel), result)
    return dq, _summed(dk, heads), _summed(dv, heads)


def _kernel(block: Block) -> Kernel | None:
    plain = block.score.softcap is None and block.dropout is None
    return kernel_for(block.q, block.v, block.mask is not None) if plain else None


def _with_heads(block: Block, kernel: Kernel | None) -> Block:
    """Repeats heads of keys and values for the heads of queries that use them, unless the kernel groups them."""
    times = block.q.shape[1] // block.k.shape[1]
    if times == 1 or (kernel is not None and kernel.groups):
        return block
    return block._replace(k=block.k.repeat_interleave(times, 1), v=block.v.repeat_interleave(times, 1))


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Sums gradients over the heads of queries that share a head of keys: [B, H, T, D] to [B, K, T, D]."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _torch_forward(block: Block) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    generator = None if block.dropout is None else block.dropout.generator(block.q.device)
    for rows in _slices(block):
        scores, _ = _scores(block, rows)
        lse = scores.logsumexp(-1)
        # For a query that sees no key, exp(-inf - 0) is 0.
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        if block.dropout is not None and generator is not None:
            weights = weights * block.dropout.factors(weights, generator)
        outs.append(weights.to(block.v.dtype) @ block.v)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _torch_backward(block: Block, result: Result) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, (grad, out, lse) = block.q, block.k, block.v, result
    generator = None if block.dropout is None else block.dropout.generator(q.device)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    for rows in _slices(block):
        scores, slope = _scores(block, rows)
        weights = (scores - lse[:, :, rows, None]).exp()
        g = grad[:, :, rows]
        kept, d = weights, (g @ v.mT).to(lse.dtype)
        if block.dropout is not None and generator is not None:
            factors = block.dropout.factors(weights, generator)
            kept, d = weights * factors, d * factors
        dv += (kept.to(g.dtype).mT @ g).to(lse.dtype)
        shared = (g.to(lse.dtype) * out[:, :, rows].to(lse.dtype)).sum(-1, keepdim=True)
        d = weights * (d - shared) * block.scale
        d = (d if slope is None else d * slope).to(q.dtype)
        dq[:, :, rows] = d @ k
        dk += (d.mT @ q[:, :, rows]).to(lse.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _scores(block: Block, rows: slice) -> tuple[Tensor, Tensor | None]:
    """Returns the scores of some queries in at least float32, and the slope of the soft cap.

    Keys that are not seen have minus infinity.
    """
    q, k, softcap = block.q[:, :, rows], block.k, block.score.softcap
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * block.scale
    slope = None
    if softcap is not None:
        bounded = torch.tanh(scores / softcap)
        scores, slope = bounded * softcap, 1 - bounded.square()
    mask = None if block.mask is None else block.mask.visible[:, :, rows]
    if block.causal:
        index = torch.arange(k.shape[2], device=k.device)
        mask = index <= index[rows, None]
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)), slope


def _slices(block: Block) -> list[slice]:
    """Returns slices of the queries with at most `_SCORES` scores each."""
    batch, heads, queries = block.q.shape[:3]
    rows = max(1, _SCORES // max(1, batch * heads * block.k.shape[2]))
    return [slice(first, min(first + rows, queries)) for first in range(0, queries, rows)]
