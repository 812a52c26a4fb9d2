"""Ulysses: an all-to-all distributes queries, keys and values by heads, and another returns the outputs.

DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models. Jacobs et
al., 2023, arXiv 2309.14509. Between them, a rank has all positions of some heads, and computes attention as a single
process does. Departure: if there are fewer heads of keys and values than ranks, they are repeated.

Elements that a rank puts into all-to-alls for each layer, with Q, P and O the elements of its queries, of its repeated
keys and values, and of its outputs: Q + P + O in forward, and the same in backward.

Shapes: B rows, H heads, n ranks, S positions of a chunk, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_plugins.context.blockwise import Attention, MergedOutput, add_sinks, attend, attend_backward, sinks_gradient
from dlo_plugins.context.ring import Ring
from dlo_plugins.context.visibility import Documents

#: Least number of positions in a chunk of the full sequence.
_CHUNK = 1024


#: The collectives that torch.compile traces.
_OPS = torch.ops._c10d_functional


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, attention: Callable[[Tensor, Tensor, Tensor], Tensor], ring: Ring
) -> Tensor:
    """Returns the output of this rank's queries, [B, H, 2 S, E].

    Args:
        q: Queries of this rank's two chunks, [B, H, 2 S, D].
        k: Keys of this rank's two chunks, [B, K, 2 S, D].
        v: Values of this rank's two chunks, [B, K, 2 S, E].
        attention: Function that computes the full sequence's output, [B, H / n, L, E], of its queries, keys and values.
        ring: Ring of the ranks.

    Raises:
        DloError: If H is not divisible by the ranks.
    """
    if q.shape[1] % ring.size:
        raise DloError(heads_error(q.shape[1], ring.size))
    times = kv_repeats(k.shape[1], ring.size)
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    q, k, v = _ByHeads.apply(q, ring), _ByHeads.apply(k, ring), _ByHeads.apply(v, ring)
    found: Tensor = _BySequence.apply(attention(q, k, v), ring)
    return found


def chunk_count(length: int, most: int) -> int:
    """Returns the number of chunks of the full sequence, for masks and skipped pairs of a good size.

    Args:
        length: Length of the sequence.
        most: Largest number of chunks, a divisor of `length`; the result divides it.
    """
    return max((n for n in range(1, most + 1) if most % n == 0 and length // n >= _CHUNK), default=1)


def local_sinks(sinks: Tensor | None, ring: Ring) -> Tensor | None:
    """Returns the sinks of the heads that this rank has between the all-to-alls, [H / n]; None without sinks."""
    return None if sinks is None else sinks.chunk(ring.size)[ring.rank]


def kv_repeats(kv_heads: int, ranks: int) -> int:
    """Returns the number of repeats of each head of keys and values, so that they are divisible by the ranks."""
    return ranks // math.gcd(kv_heads, ranks)


def heads_error(heads: int, ranks: int) -> str:
    """Returns the message for heads of queries that are not divisible by the ranks."""
    works = [size for size in range(1, heads + 1) if heads % size == 0]
    near = min(works, key=lambda size: abs(size - ranks))
    return (
        f"cp must divide the {heads} heads for context parallelism by ulysses, got {ranks}; set cp={near} (or another"
        f" of {', '.join(map(str, works))}), or method: ring"
    )


def full_forward(
    q: Tensor, k: Tensor, v: Tensor, what: Attention, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the output of the full sequence on one rank, [B, H, L, E], and its log-sum-exp, [B, H, L].

    It is computed chunk by chunk: no tensor of L x L exists.
    """
    what = _with_fewest_chunks(what)
    chunks = range(what.documents.chunks)
    out = MergedOutput(q, v.shape[-1])
    attend(what, out, q, chunks, k, v, chunks)
    add_sinks(out, sinks)
    return out.value(), out.lse


def full_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, what: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v; `out` and `lse` are those of :func:`full_forward`."""
    what = _with_fewest_chunks(what)
    chunks = range(what.documents.chunks)
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    attend_backward(what, grad, out, lse, q, chunks, k, v, chunks, (dq, dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _with_fewest_chunks(what: Attention) -> Attention:
    """Returns the same attention in one chunk where no pair of chunks needs a mask or is left out."""
    if what.documents.plain and what.window is None:
        return replace(what, documents=Documents(what.documents.length, 1))
    return what


class FullAttention(torch.autograd.Function):
    """Attention of the full sequence on one rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, what: Attention) -> Tensor:
        """Returns the output of :func:`full_forward`."""
        out, lse = full_forward(q, k, v, what, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.what = what
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k, v and the sinks."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        of_sinks = sinks_gradient(grad, out, lse, sinks)
        return *full_backward(grad, q, k, v, out, lse, ctx.what), of_sinks, None


class _ByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return scatter_heads(x, ring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_heads(grad, ctx.ring), None


class _BySequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return gather_heads(x, ring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scatter_heads(grad, ctx.ring), None


def scatter_heads(x: Tensor, ring: Ring) -> Tensor:
    """Exchanges chunks of all heads for some heads of the full sequence: [B, H, 2 S, D] to [B, H / n, 2 n S, D]."""
    sent = torch.stack(x.chunk(ring.size, 1))  # [n, B, H / n, 2 S, D]
    received = _all_to_all(sent, ring)
    head, tail = received.chunk(2, 3)  # each [n, B, H / n, S, D]: chunks 0..n-1, and 2n-1..n
    return torch.cat([*head, *reversed(tail.unbind())], 2)


def gather_heads(x: Tensor, ring: Ring) -> Tensor:
    """Exchanges heads for chunks of all heads: [B, H / n, 2 n S, D] to [B, H, 2 S, D]; `scatter_heads` undoes it."""
    pieces = x.chunk(2 * ring.size, 2)
    sent = torch.stack([torch.cat([pieces[r], pieces[2 * ring.size - 1 - r]], 2) for r in range(ring.size)])
    received = _all_to_all(sent, ring)  # [n, B, H / n, 2 S, D]
    # In memory [B, 2 S, H, D], as the output projection reads it.
    return received.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)


def _all_to_all(sent: Tensor, ring: Ring) -> Tensor:
    if torch.compiler.is_compiling():  # Not counted; torch's operator is a node of the graph.
        splits = [1] * ring.size
        return _OPS.wait_tensor(_OPS.all_to_all_single(sent, splits, splits, ring.group_name))
    ring.elements["all_to_all"] += sent.numel()
    received = torch.empty_like(sent)
    if not sent.is_meta:  # A meta tensor has no data to send.
        dist.all_to_all_single(received, sent, group=ring.group)
    return received
