"""Custom operators of attention over a sharded sequence, for the graphs of torch.compile.

Messages between ranks and the choice of a kernel for each pair of chunks are Python that torch.compile cannot trace. A
custom operator (`torch.library`) with fake kernels and an autograd formula is one node of the graph, so it does not
break a block's graph. Eager code calls the same functions without the operators, so that dispatch modes (traffic,
waits, selective recomputation) see the operations inside.

An operator gets only tensors and constants, and one graph serves all batches. So a ticket identifies the documents of a
batch: an int64 scalar tensor on the CPU, a number for each batch or micro-batch. Backward gets its forward's ticket.

Shapes: B rows, H heads of queries, K heads of keys and values, P positions of this rank (`ring_attention`) or of the
full sequence (`full_attention`), D and E widths of keys and values.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_plugins.context.block_attention import Dropout, Score
from dlo_plugins.context.blockwise import Attention
from dlo_plugins.context.ring import Ring, ring_backward, ring_forward
from dlo_plugins.context.ulysses import full_backward, full_forward
from dlo_plugins.context.visibility import Documents


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


def documents_for(rows: int, queries: int, keys: int, ring: Ring, documents: Documents | None) -> Documents:
    """Checks the shapes of queries and keys, and returns the documents of their batch.

    Args:
        rows: Rows of queries and keys, B.
        queries: Positions of this rank's queries.
        keys: Positions of this rank's keys.
        ring: Ranks that share the sequence.
        documents: Documents of the batch under way; None if there is none.

    Raises:
        DloError: If no batch has been sharded, or the shapes are not those of the sharded batch.
    """
    if documents is None:
        raise DloError(
            "a batch must be sharded before the model's forward under context parallelism, got one that was not;"
            " pass it through shard_batch, or run the model inside `local()`"
        )
    expected = rows if documents.first_start is None else len(documents.first_start)
    positions = documents.length // ring.size
    if (rows, queries, keys) != (expected, positions, positions):
        raise DloError(
            f"attention must have the {expected} rows of {positions} tokens of this rank's shard, got"
            f" {rows} rows of {queries} queries and {keys} keys; pass each batch through"
            " shard_batch, select the rows of a micro-batch (select_rows), and keep no cache of keys"
        )
    return documents


def dropout_of(rate: float, seed: int, ring: Ring, documents: Documents) -> Dropout:
    """Returns the dropout of this rank; each pair of chunks on each rank has its own seed."""
    return Dropout(rate, seed + ring.rank * documents.chunks**2)


def _attention(
    q: Tensor,
    k: Tensor,
    ticket: Tensor,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    rate: float,
    is_full: bool,
) -> tuple[Attention, Ring]:
    """Returns the attention of an operator's arguments, and the ring.

    Args:
        q: Queries, [B, H, P, D].
        k: Keys, [B, K, P, D].
        ticket: Number of the batch.
        seed: Seed of dropout.
        scale: Factor of scores.
        softcap: Soft bound of scores.
        window: Number of tokens that a token sees.
        rate: Rate of weights that are dropped.
        is_full: Whether queries and keys have the positions of all ranks.
    """
    issued = _issued.get(int(ticket))
    if issued is None:
        raise DloError(
            "backward of a compiled block under context parallelism must come before its batch is released, got it"
            " after; call backward before the next shard_batch, or leave out CompileBlocks"
        )
    ranks = issued.ring.size if is_full else 1
    documents = documents_for(q.shape[0], q.shape[2] // ranks, k.shape[2] // ranks, issued.ring, issued.documents)
    dropout = None if seed is None else dropout_of(rate, int(seed), issued.ring, documents)
    return Attention(documents, Score(scale, softcap), window, dropout), issued.ring


@torch.library.custom_op("dlo::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ticket: Tensor,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`~dlo_plugins.context.ring.ring_forward` for the batch of a ticket.

    Args:
        q: Queries, [B, H, P, D].
        k: Keys, [B, K, P, D].
        v: Values, [B, K, P, E].
        ticket: Number of the batch; see :func:`issue`.
        seed: Seed of dropout, an int64 scalar, the same on all ranks; None without dropout.
        scale: Factor of scores.
        softcap: Soft bound of scores; None for none.
        window: Number of tokens that a token sees, itself included; None for all before it.
        dropout: Rate of weights that are dropped.

    Raises:
        DloError: If no batch has been sharded, or the shapes are not those of the sharded batch.
    """
    what, ring = _attention(q, k, ticket, seed, scale, softcap, window, dropout, False)
    return ring_forward(q, k, v, what, ring)


@torch.library.custom_op("dlo::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ticket: Tensor,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`~dlo_plugins.context.ring.ring_backward`; arguments as in :func:`ring_attention`."""
    what, ring = _attention(q, k, ticket, seed, scale, softcap, window, dropout, False)
    return _unalias(ring_backward(grad, q, k, v, out, lse, what, ring))


@torch.library.custom_op("dlo::full_attention", mutates_args=())
def full_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ticket: Tensor,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Computes :func:`~dlo_plugins.context.ulysses.full_forward`; arguments as in :func:`ring_attention`."""
    what, _ = _attention(q, k, ticket, seed, scale, softcap, window, dropout, True)
    return full_forward(q, k, v, what)


@torch.library.custom_op("dlo::full_attention_backward", mutates_args=())
def full_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ticket: Tensor,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes :func:`~dlo_plugins.context.ulysses.full_backward`; arguments as in :func:`ring_attention`."""
    what, _ = _attention(q, k, ticket, seed, scale, softcap, window, dropout, True)
    return _unalias(full_backward(grad, q, k, v, out, lse, what))


def _unalias(grads: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients that share no memory: a custom operator's results must not be aliases."""
    dq, dk, dv = grads
    if dk.untyped_storage().data_ptr() == dv.untyped_storage().data_ptr():
        dv = dv.clone()
    return dq, dk.contiguous(), dv.contiguous()


def _like_forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns empty tensors with the shapes, dtypes and strides of forward's results."""
    rows, heads, positions = q.shape[:3]
    out = q.new_empty((rows, positions, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((rows, heads, positions), dtype=torch.promote_types(q.dtype, torch.float32))


def _like_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns empty tensors with the shapes, dtypes and strides of backward's results."""
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ticket, seed, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, ticket, seed)


def _ring_gradients(ctx: Any, grad: Tensor, of_lse: Tensor | None) -> tuple[Any, ...]:
    return *ring_attention_backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 6


def _full_gradients(ctx: Any, grad: Tensor, of_lse: Tensor | None) -> tuple[Any, ...]:
    return *full_attention_backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 6


for _forward, _backward, _gradients in (
    (ring_attention, ring_attention_backward, _ring_gradients),
    (full_attention, full_attention_backward, _full_gradients),
):
    _forward.register_fake(_like_forward)
    _backward.register_fake(_like_backward)
    _forward.register_autograd(_gradients, setup_context=_save)
