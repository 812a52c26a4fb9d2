"""Attention over a sequence that ranks share, by a ring or by Ulysses; in compiled code, by operators of its graph.

Ring attention: ranks pass keys and values around a ring, so that each rank's queries see those of all ranks. Ring
Attention with Blockwise Transformers for Near-Infinite Context. Liu, Zaharia & Abbeel, 2023, arXiv 2310.01889.
Departures: a rank has one chunk from the head and one from the tail (`sequence_layout`), so that causal attention is
the same work on all ranks; pairs of chunks in which no query sees a key are skipped; and a rank does not send its own
contribution to its keys' gradients: backward takes 2 (n - 1) transfers of a rank's keys and values, where the paper's
takes 2 n - 1. Elements that a rank sends for each layer, with n ranks and P the elements of its keys and values:
(n - 1) P in forward, 2 (n - 1) P in backward, and (n - 1) P more with recomputation.

Ulysses: an all-to-all distributes queries, keys and values by heads, and another returns the outputs. DeepSpeed
Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models. Jacobs et al., 2023,
arXiv 2309.14509. Between them, a rank has all positions of some heads, and computes attention as a single process does.
Departure: if there are fewer heads of keys and values than ranks, they are repeated. Elements that a rank puts into
all-to-alls for each layer, with Q, P and O the elements of its queries, of its repeated keys and values, and of its
outputs: Q + P + O in forward, and the same in backward.

Messages between ranks and the choice of a kernel for each pair of chunks are Python that torch.compile cannot trace. A
custom operator (`torch.library`) with fake kernels and an autograd formula is one node of the graph, so it does not
break a block's graph. Eager code calls the same functions without the operators, so that dispatch modes (traffic,
waits, selective recomputation) see the operations inside. An operator gets only tensors and constants, and one graph
serves all batches. So a ticket identifies the documents of a batch: an int64 scalar tensor on the CPU, a number for
each batch or micro-batch. Backward gets its forward's ticket.

Shapes: B rows, H heads of queries, K heads of keys and values, n ranks, S positions of a chunk, P positions of this
rank or, between the all-to-alls, of the full sequence, D and E widths of keys and values.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.distributed import collectives
from dlo_framework.distributed.collectives import Communicator, Pending, with_backward
from dlo_framework.errors import DloError
from dlo_plugins.parallel.context.block_attention import (
    Attention,
    Dropout,
    MergedOutput,
    Score,
    add_sinks,
    attend,
    attend_backward,
    sinks_gradient,
)
from dlo_plugins.parallel.context.sequence_layout import Documents, chunks_of

#: Tags by which gloo separates transfers that run at the same time.
_KEYS, _GRADIENTS = 1, 2
#: Least number of positions in a chunk of the full sequence.
_CHUNK = 1024
#: The collectives that torch.compile traces.
_OPS = torch.ops._c10d_functional


class Ring(Communicator):
    """Ring of the ranks that share a sequence.

    Its `elements` count keys and values in forward and in backward, gradients, and all-to-alls by names of their own.
    """

    def limit(self, device: torch.device) -> timedelta | None:
        """Returns the longest time of a transfer of a device's tensors; None for the group's own limit.

        On NCCL it is None, also where the group has gloo for CPU tensors: the host would wait for each transfer.
        """
        on_gloo = collectives.backend_of(self.group, device) == "gloo"
        return collectives.exchange_limit(self.group) if on_gloo else None

    def shift(self, sent: Tensor, tag: int, what: str) -> Pending:
        """Starts a transfer of a tensor to the next rank, and of another from the previous rank, which it waits for.

        Args:
            sent: Tensor to send, 1-D and contiguous; it must not change until the wait.
            tag: Tag that separates this transfer from others that run at the same time.
            what: Name under which its elements are counted.
        """
        self.elements[what] += sent.numel()
        return start_transfer(self, sent, tag)

    def chunks(self, back: int) -> tuple[int, int]:
        """Returns the numbers of the two chunks of the rank that is `back` places before this one."""
        return chunks_of((self.rank - back) % self.size, self.size)

    def rotate(self, k: Tensor, v: Tensor, what: str) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
        """Yields the chunks, keys and values of one rank after the other, while the next ones are on their way."""
        flat = torch.cat([k.reshape(-1), v.reshape(-1)]) if self.size > 1 else k
        for step in range(self.size):
            coming = self.shift(flat, _KEYS, what) if step < self.size - 1 else None
            yield self.chunks(step), k, v
            if coming is not None:
                flat = coming.wait()
                k, v = _split(flat, k, v)


def start_transfer(ring: Ring, sent: Tensor, tag: int) -> Pending:
    """Starts the transfers of :meth:`Ring.shift`."""
    device, limit = sent.device, ring.limit(sent.device)
    sent = sent.cpu() if collectives.is_sent_by_host(ring.group, device) else sent
    received, works = torch.empty_like(sent), list[dist.Work]()
    if not sent.is_meta:  # A meta tensor has no data to send.
        after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        pair = [
            dist.P2POp(dist.isend, sent, group=ring.group, tag=tag, group_peer=after),
            dist.P2POp(dist.irecv, received, group=ring.group, tag=tag, group_peer=before),
        ]
        works = dist.batch_isend_irecv(pair)
    return Pending(works, lambda: received.to(device), limit)


def _split(flat: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a flat tensor as two of the shapes of keys and values."""
    return flat[: k.numel()].view(k.shape), flat[k.numel() :].view(v.shape)


def shared_forward(
    q: Tensor, k: Tensor, v: Tensor, what: Attention, ring: Ring | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the output of this rank's queries, [B, H, P, E], and its log-sum-exp, [B, H, P].

    It is computed chunk by chunk: no tensor of the square of the positions exists.

    Args:
        q: Queries of this rank, [B, H, P, D].
        k: Keys of this rank, [B, K, P, D].
        v: Values of this rank, [B, K, P, E].
        what: Attention to compute.
        ring: Ring of the ranks, each with two chunks; None if this rank has all chunks.
        sinks: Score of each head's attention sink, [H]; None without sinks.
    """
    what, own, rounds = _rounds(k, v, what, ring, "forward_keys_values")
    out = MergedOutput(q, v.shape[-1])
    for chunks, keys, values in rounds:
        attend(what, out, q, own, keys, values, chunks)
    add_sinks(out, sinks)
    return out.value(), out.lse


def shared_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, what: Attention, ring: Ring | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v; arguments are those and results of :func:`shared_forward`.

    The gradient of a rank's keys and values starts at the next rank, one step late; each rank adds its contribution and
    sends the sum to the next rank, until it is back.
    """
    what, own, rounds = _rounds(k, v, what, ring, "backward_keys_values")
    dq = torch.zeros_like(q, dtype=lse.dtype)
    home = torch.zeros(k.numel() + v.numel(), dtype=lse.dtype, device=k.device)
    grown: Pending | None = None
    for chunks, keys, values in rounds:
        here = home if chunks == own else torch.zeros_like(home)
        attend_backward(what, grad, out, lse, q, own, keys, values, chunks, (dq, *_split(here, k, v)))
        if ring is not None and here is not home:
            if grown is not None:
                here += grown.wait()
            grown = ring.shift(here, _GRADIENTS, "backward_gradients")
    if grown is not None:
        home += grown.wait()
    dk, dv = _split(home, k, v)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _rounds(
    k: Tensor, v: Tensor, what: Attention, ring: Ring | None, name: str
) -> tuple[Attention, Sequence[int], Iterator[tuple[Sequence[int], Tensor, Tensor]]]:
    """Returns the attention, this rank's chunks, and the chunks, keys and values that its queries may see, in turn."""
    if ring is not None:
        return what, ring.chunks(0), ring.rotate(k, v, name)
    if what.documents.plain and what.window is None:  # No pair of chunks needs a mask or is left out.
        what = replace(what, documents=Documents(what.documents.length, 1))
    chunks = range(what.documents.chunks)
    return what, chunks, iter([(chunks, k, v)])


class SharedAttention(torch.autograd.Function):
    """Attention of this rank's queries; saves only this rank's tensors for backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, what: Attention, ring: Ring | None
    ) -> Tensor:
        """Returns the output of :func:`shared_forward`."""
        out, lse = shared_forward(q, k, v, what, ring, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.what, ctx.ring = what, ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of q, k, v and the sinks."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        of_sinks = sinks_gradient(grad, out, lse, sinks)
        return *shared_backward(grad, q, k, v, out, lse, ctx.what, ctx.ring), of_sinks, None, None


# --- Ulysses ---------------------------------------------------------------------------------------------------------


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
    times = ring.size // math.gcd(k.shape[1], ring.size)
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scatter, gather = functools.partial(_scatter_heads, ring), functools.partial(_gather_heads, ring)
    q, k, v = (with_backward(x, scatter, gather) for x in (q, k, v))
    return with_backward(attention(q, k, v), gather, scatter)


def chunk_count(length: int, most: int) -> int:
    """Returns the number of chunks of the full sequence, for masks and skipped pairs of a good size.

    Args:
        length: Length of the sequence.
        most: Largest number of chunks, a divisor of `length`; the result divides it.
    """
    return max((n for n in range(1, most + 1) if most % n == 0 and length // n >= _CHUNK), default=1)


def heads_error(heads: int, ranks: int) -> str:
    """Returns the message for heads of queries that are not divisible by the ranks."""
    works = [size for size in range(1, heads + 1) if heads % size == 0]
    near = min(works, key=lambda size: abs(size - ranks))
    return (
        f"cp must divide the {heads} heads for context parallelism by ulysses, got {ranks}; set cp={near} (or another"
        f" of {', '.join(map(str, works))}), or method: ring"
    )


def _scatter_heads(ring: Ring, x: Tensor) -> Tensor:
    """Exchanges chunks of all heads for some heads of the full sequence: [B, H, 2 S, D] to [B, H / n, 2 n S, D]."""
    sent = torch.stack(x.chunk(ring.size, 1))  # [n, B, H / n, 2 S, D]
    received = _all_to_all(sent, ring)
    head, tail = received.chunk(2, 3)  # each [n, B, H / n, S, D]: chunks 0..n-1, and 2n-1..n
    return torch.cat([*head, *reversed(tail.unbind())], 2)


def _gather_heads(ring: Ring, x: Tensor) -> Tensor:
    """Exchanges heads for chunks of all heads: [B, H / n, 2 n S, D] to [B, H, 2 S, D]."""
    pieces = x.chunk(2 * ring.size, 2)
    sent = torch.stack([torch.cat([pieces[r], pieces[2 * ring.size - 1 - r]], 2) for r in range(ring.size)])
    received = _all_to_all(sent, ring)  # [n, B, H / n, 2 S, D]
    # In memory [B, 2 S, H, D], as the output projection reads it.
    return received.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)


def _all_to_all(sent: Tensor, ring: Ring) -> Tensor:
    if torch.compiler.is_compiling():  # Not counted; torch's operator is a node of the graph.
        splits = [1] * ring.size
        return _OPS.wait_tensor(_OPS.all_to_all_single(sent, splits, splits, ring._name))
    ring.elements["all_to_all"] += sent.numel()
    received = torch.empty_like(sent)
    if not sent.is_meta:  # A meta tensor has no data to send.
        dist.all_to_all_single(received, sent, group=ring.group)
    return received


# --- operators for torch.compile -------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Issued:
    """Ring and documents of a ticket.

    Attributes:
        ring: Ranks that share the sequence.
        documents: Documents of the batch; None before the first batch.
    """

    ring: Ring
    documents: Documents | None


_numbers = itertools.count()
_issued: weakref.WeakValueDictionary[int, _Issued] = weakref.WeakValueDictionary()


def issue(ring: Ring, documents: Documents | None) -> Tensor:
    """Returns a ticket, an int64 scalar tensor on the CPU, which is valid as long as the tensor exists.

    Args:
        ring: Ranks that share the sequence.
        documents: Documents of a batch; None before the first batch: operators raise an error then.
    """
    number = next(_numbers)
    ticket = torch.tensor(number, device="cpu")
    ticket.issued = _issued[number] = _Issued(ring, documents)  # type: ignore[attr-defined]
    return ticket


def describe_attention(
    q: Tensor,
    k: Tensor,
    ring: Ring,
    documents: Documents | None,
    score: Score,
    window: int | None,
    rate: float,
    seed: Tensor | None,
    is_full: bool = False,
) -> Attention:
    """Returns the attention of a batch's queries and keys, whose shapes it checks.

    Args:
        q: Queries of this rank's positions, or of all.
        k: Keys of the same positions.
        ring: Ranks that share the sequence.
        documents: Documents of the batch under way; None if there is none.
        score: Score function.
        window: Number of tokens that a token sees, itself included; None for all before it.
        rate: Rate of weights that are dropped.
        seed: Seed of dropout, a scalar, the same on all ranks: each pair of chunks on each rank has its own, also on
            ranks that have the same chunks of other heads. None without dropout.
        is_full: Whether queries and keys have the positions of all ranks.

    Raises:
        DloError: If no batch has been sharded, or the shapes are not those of the sharded batch.
    """
    if documents is None:
        raise DloError(UNSHARDED)
    expected = len(q) if documents.first_start is None else len(documents.first_start)
    positions = documents.length // (1 if is_full else ring.size)
    if (len(q), q.shape[2], k.shape[2]) != (expected, positions, positions):
        raise DloError(
            f"attention must have the {expected} rows of {positions} tokens of this rank's shard, got"
            f" {len(q)} rows of {q.shape[2]} queries and {k.shape[2]} keys; pass each batch through"
            " shard_batch, select the rows of a micro-batch (select_rows), and keep no cache of keys"
        )
    dropout = None if seed is None else Dropout(rate, int(seed) + ring.rank * documents.chunks**2)
    return Attention(documents, score, window, dropout)


UNSHARDED = (
    "a batch must be sharded before the model's forward under context parallelism, got one that was not; pass it"
    " through shard_batch, or run the model inside use_full_sequences()"
)
_TENSORS = "Tensor q, Tensor k, Tensor v"
_SETTINGS = "Tensor ticket, Tensor? seed, float scale, float? softcap, SymInt? window, float dropout"


def _make_operator(name: str, is_full: bool) -> Any:
    """Returns a custom operator of attention, with its backward's.

    Its arguments:

    - ``q``, ``k``, ``v``: queries [B, H, P, D], keys [B, K, P, D] and values [B, K, P, E].
    - ``sinks``: score of each head's attention sink, [H]; None without sinks.
    - ``ticket``: number of the batch; see :func:`issue`.
    - ``seed``, ``window``, ``dropout``: as in :func:`describe_attention`.
    - ``scale``, ``softcap``: factor of scores, and their soft bound; None for none.

    It raises a DloError if no batch has been sharded, or the shapes are not those of the sharded batch.

    Args:
        name: Name of the operator.
        is_full: Whether queries and keys have the positions of all ranks, as Ulysses gathers them, instead of those of
            this rank, as the ring sends them round.
    """

    def described(
        q: Tensor,
        k: Tensor,
        ticket: Tensor,
        seed: Tensor | None,
        scale: float,
        softcap: float | None,
        window: int | None,
        rate: float,
    ) -> tuple[Attention, Ring | None]:
        issued = _issued.get(int(ticket))
        if issued is None:
            raise DloError(
                "backward of a compiled block under context parallelism must come before its batch is released, got it"
                " after; call backward before the next shard_batch, or leave out CompileBlocks"
            )
        score, ring = Score(scale, softcap), issued.ring
        what = describe_attention(q, k, ring, issued.documents, score, window, rate, seed, is_full)
        return what, None if is_full else ring

    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
        return shared_forward(q, k, v, *described(q, k, *settings), sinks)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *settings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = shared_backward(grad, q, k, v, out, lse, *described(q, k, *settings))
        return dq, dk, dv.clone()  # A custom operator's results must not share memory.

    operator = torch.library.custom_op(
        f"dlo::{name}", forward, mutates_args=(), schema=f"({_TENSORS}, Tensor? sinks, {_SETTINGS}) -> (Tensor, Tensor)"
    )
    gradient = torch.library.custom_op(
        f"dlo::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor grad, {_TENSORS}, Tensor out, Tensor lse, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    )

    def gradients(ctx: Any, grad: Tensor, of_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse, *settings = ctx.saved_tensors
        of_sinks = sinks_gradient(grad, out, lse, sinks)
        return *gradient(grad, q, k, v, out, lse, *settings, *ctx.rest), of_sinks, *[None] * 6

    operator.register_fake(_like_forward)
    gradient.register_fake(_like_backward)
    operator.register_autograd(gradients, setup_context=_save)
    return operator


def _like_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns empty tensors with the shapes, dtypes and strides of forward's results."""
    rows, heads, positions = q.shape[:3]
    out = q.new_empty((rows, positions, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((rows, heads, positions), dtype=torch.promote_types(q.dtype, torch.float32))


def _like_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns empty tensors with the shapes, dtypes and strides of backward's results."""
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, ticket, seed, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, ticket, seed)


ring_attention = _make_operator("ring_attention", is_full=False)
full_attention = _make_operator("full_attention", is_full=True)
