"""Attention of a block of queries to a block of keys, with the log-sum-exp by which blocks are merged.

A fused kernel computes it if one fits. Otherwise (soft-capped scores, dropout, values of another width than keys, other
devices) a kernel written in torch computes the same, some queries at a time.

Shapes: B rows, H heads of queries, K heads of keys and values, S queries, T keys, D and E widths of keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_plugins.context.fused import Block, Kernel, Result, kernel_for
from dlo_plugins.context.visibility import PairMask

#: Largest number of scores that the torch kernel keeps at a time.
_SCORES = 2**24


@dataclass(frozen=True)
class Score:
    """Score function of a query and a key.

    Attributes:
        scale: Factor on their product.
        softcap: Soft bound, `softcap * tanh(score / softcap)` (Gemma 2); None for no bound.
    """

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights, the same in forward and backward.

    Attributes:
        rate: Rate of dropped weights; the others are divided by `1 - rate`.
        seed: Seed of the random numbers.
    """

    rate: float
    seed: int

    def generator(self, device: torch.device) -> torch.Generator:
        """Returns a new generator for a block's random numbers."""
        return torch.Generator(device).manual_seed(self.seed)

    def factors(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Returns the factors on some weights, 0 or `1 / (1 - rate)`."""
        drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
        return (drawn >= self.rate).to(weights.dtype) / (1 - self.rate)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score,
    causal: bool,
    mask: PairMask | None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns a block's output [B, H, S, E], and the log of the sum of its exponentials [B, H, S].

    A query that sees no key gets zeros, and minus infinity.

    Args:
        q: Queries [B, H, S, D].
        k: Keys [B, K, T, D]; each head serves H / K consecutive heads of queries.
        v: Values [B, K, T, E].
        score: Score function.
        causal: Whether a query sees only the keys of its own number and before; S = T then.
        mask: Mask `[B or 1, 1, S, T]` of the keys that are seen; not with `causal`.
        dropout: Dropout of this block's weights.
    """
    kernel = _kernel(q, v, score, mask, dropout)
    if kernel is None or not kernel.groups:
        k, v = _repeated(k, q), _repeated(v, q)
    if kernel is not None:
        out, lse, *_ = kernel.forward(Block(q, k, v, score.scale, causal, mask))
    else:
        out, lse = _torch_forward(q, k, v, score, causal, mask, dropout)
    if mask is not None:
        out, lse = out.masked_fill(mask.blind[..., None], 0.0), lse.masked_fill(mask.blind, -math.inf)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    score: Score,
    causal: bool,
    mask: PairMask | None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a block's contribution to the gradients of q, k and v, in their shapes.

    Args:
        grad: Gradient of the output, [B, H, S, E].
        q: Queries of the forward.
        k: Keys of the forward.
        v: Values of the forward.
        out: Output, merged over all blocks.
        lse: Log-sum-exp, merged over all blocks.
        score: Score function of the forward.
        causal: Causality of the forward.
        mask: Mask of the forward.
        dropout: Dropout of the forward.
    """
    heads, kernel = k.shape[1], _kernel(q, v, score, mask, dropout)
    if kernel is None or not kernel.groups:
        k, v = _repeated(k, q), _repeated(v, q)
    if kernel is not None:
        dq, dk, dv, *_ = kernel.backward(Block(q, k, v, score.scale, causal, mask), Result(grad, out, lse))
    else:
        dq, dk, dv = _torch_backward(grad, q, k, v, out, lse, score, causal, mask, dropout)
    return dq, _summed(dk, heads), _summed(dv, heads)


def _kernel(q: Tensor, v: Tensor, score: Score, mask: PairMask | None, dropout: Dropout | None) -> Kernel | None:
    return kernel_for(q, v, mask is not None) if score.softcap is None and dropout is None else None


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Repeats heads of keys for the heads of queries that use them: [B, K, T, D] to [B, H, T, D]."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Sums gradients over the heads of queries that share a head of keys: [B, H, T, D] to [B, K, T, D]."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _torch_forward(
    q: Tensor, k: Tensor, v: Tensor, score: Score, causal: bool, mask: PairMask | None, dropout: Dropout | None
) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    generator = None if dropout is None else dropout.generator(q.device)
    for rows in _slices(q, k):
        scores, _ = _scores(
            q[:, :, rows], k, score, rows.start, causal, None if mask is None else mask.visible[:, :, rows]
        )
        lse = scores.logsumexp(-1)
        # For a query that sees no key, exp(-inf - 0) is 0.
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        if dropout is not None and generator is not None:
            weights = weights * dropout.factors(weights, generator)
        outs.append(weights.to(v.dtype) @ v)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _torch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    score: Score,
    causal: bool,
    mask: PairMask | None,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = None if dropout is None else dropout.generator(q.device)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    for rows in _slices(q, k):
        part = None if mask is None else mask.visible[:, :, rows]
        scores, slope = _scores(q[:, :, rows], k, score, rows.start, causal, part)
        weights = (scores - lse[:, :, rows, None]).exp()
        g = grad[:, :, rows]
        kept, d = weights, (g @ v.mT).to(lse.dtype)
        if dropout is not None and generator is not None:
            factors = dropout.factors(weights, generator)
            kept, d = weights * factors, d * factors
        dv += (kept.to(g.dtype).mT @ g).to(lse.dtype)
        shared = (g.to(lse.dtype) * out[:, :, rows].to(lse.dtype)).sum(-1, keepdim=True)
        d = weights * (d - shared) * score.scale
        d = (d if slope is None else d * slope).to(q.dtype)
        dq[:, :, rows] = d @ k
        dk += (d.mT @ q[:, :, rows]).to(lse.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _scores(
    q: Tensor, k: Tensor, score: Score, first: int, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns scores in at least float32, minus infinity for keys that are not seen, and the slope of the soft cap."""
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * score.scale
    slope = None
    if score.softcap is not None:
        bounded = torch.tanh(scores / score.softcap)
        scores, slope = bounded * score.softcap, 1 - bounded.square()
    if causal:
        index = torch.arange(k.shape[2], device=k.device)
        mask = index <= index[first : first + q.shape[2], None]
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)), slope


def _slices(q: Tensor, k: Tensor) -> list[slice]:
    """Returns slices of the queries with at most `_SCORES` scores each."""
    rows = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(first, min(first + rows, q.shape[2])) for first in range(0, q.shape[2], rows)]
