"""Ulysses: an all-to-all deals queries, keys and values out by heads, and another takes the outputs back.

DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models. Jacobs et
al., 2023, arXiv 2309.14509. In between, a rank has all positions of some heads, and attention is that of one process.
Departure: heads of keys and values of which there are fewer than ranks are repeated as often as it takes.

Elements that a rank brings to all-to-alls a layer, with Q, P and O those of its queries, of its keys and values as they
are repeated, and of its outputs: forward Q + P + O, backward the same.

Shapes: B rows, H heads, n ranks, S positions of a chunk, D width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_plugins.context.blockwise import Attention, Output, attend, attend_backward
from dlo_plugins.context.ring import Ring
from dlo_plugins.context.visibility import Documents

#: Positions of a chunk of the whole sequence, at least.
_CHUNK = 1024


def attend_by_heads(q: Tensor, k: Tensor, v: Tensor, what: Attention, ring: Ring) -> Tensor:
    """Returns the output of this rank's queries, [B, H, 2 S, E].

    Args:
        q: this rank's two chunks, [B, H, 2 S, D].
        k: same, [B, K, 2 S, D].
        v: same, [B, K, 2 S, E].
        what: the attention.
        ring: the ranks.

    Raises:
        DloError: if the ranks do not divide H.
    """
    if q.shape[1] % ring.size:
        raise DloError(heads_message(q.shape[1], ring.size))
    times = repeats(k.shape[1], ring.size)
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    if what.documents.plain and what.window is None:
        what = replace(what, documents=Documents(what.documents.length, 1))
    q, k, v = (_ByHeads.apply(x, ring) for x in (q, k, v))
    return _BySequence.apply(WholeAttention.apply(q, k, v, what), ring)


def whole_chunks(length: int, most: int) -> int:
    """Returns into how many chunks a rank cuts the whole sequence, so that masks and skipped pairs are of a good size.

    Args:
        length: of the sequence.
        most: divides it; so does the result, which divides `most`.
    """
    return max((n for n in range(1, most + 1) if most % n == 0 and length // n >= _CHUNK), default=1)


def repeats(kv_heads: int, ranks: int) -> int:
    """Returns how often each head of keys and values is repeated, so that the ranks divide them."""
    return ranks // math.gcd(kv_heads, ranks)


def heads_message(heads: int, ranks: int) -> str:
    """Returns what to say if the ranks do not divide the heads of queries."""
    works = [size for size in range(1, heads + 1) if heads % size == 0]
    near = min(works, key=lambda size: abs(size - ranks))
    return (
        f"context parallelism by ulysses deals heads out to ranks: {heads} heads are not divisible by cp={ranks}; use"
        f" cp={near} (or another of {', '.join(map(str, works))}), or method ring"
    )


class WholeAttention(torch.autograd.Function):
    """Attention of the whole sequence on one rank, chunk by chunk: nothing of L x L is held."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, what: Attention) -> Tensor:
        """Returns the output, [B, H, L, E]."""
        chunks = range(what.documents.chunks)
        out = Output(q, v.shape[-1])
        attend(what, out, q, chunks, k, v, chunks)
        value = out.value()
        ctx.save_for_backward(q, k, v, value, out.lse)
        ctx.what = what
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        chunks = range(ctx.what.documents.chunks)
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        attend_backward(ctx.what, grad, out, lse, q, chunks, k, v, chunks, (dq, dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class _ByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return by_heads(x, ring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return by_sequence(grad, ctx.ring), None


class _BySequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return by_sequence(x, ring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return by_heads(grad, ctx.ring), None


def by_heads(x: Tensor, ring: Ring) -> Tensor:
    """Gives a rank some heads of the whole sequence: [B, H, 2 S, D] to [B, H / n, 2 n S, D], in its order."""
    sent = torch.stack(x.chunk(ring.size, 1))  # [n, B, H / n, 2 S, D]
    received = _all_to_all(sent, ring)
    head, tail = received.chunk(2, 3)  # each [n, B, H / n, S, D]: chunks 0..n-1, and 2n-1..n
    return torch.cat([*head, *reversed(tail.unbind())], 2)


def by_sequence(x: Tensor, ring: Ring) -> Tensor:
    """Gives a rank its chunks of all heads: [B, H / n, 2 n S, D] to [B, H, 2 S, D]; the inverse of the other."""
    pieces = x.chunk(2 * ring.size, 2)
    sent = torch.stack([torch.cat([pieces[r], pieces[2 * ring.size - 1 - r]], 2) for r in range(ring.size)])
    received = _all_to_all(sent, ring)  # [n, B, H / n, 2 S, D]
    # In memory [B, 2 S, H, D], which is how the output projection takes it.
    return received.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)


def _all_to_all(sent: Tensor, ring: Ring) -> Tensor:
    ring.elements["all_to_all"] += sent.numel()
    received = torch.empty_like(sent)
    if not sent.is_meta:  # Else nothing is there to be sent.
        dist.all_to_all_single(received, sent, group=ring.group)
    return received
