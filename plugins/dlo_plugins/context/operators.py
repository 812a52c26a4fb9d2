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
from dlo_plugins.context.blockwise import Attention, sinks_gradient
from dlo_plugins.context.fused import Dropout, Score
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
    is_full: bool,
    ticket: Tensor,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    rate: float,
) -> tuple[Attention, Ring]:
    """Returns the attention of an operator's arguments, and the ring; see :func:`_make_operator`."""
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


_TENSORS = "Tensor q, Tensor k, Tensor v"
_SETTINGS = "Tensor ticket, Tensor? seed, float scale, float? softcap, SymInt? window, float dropout"


def _make_operator(name: str, is_full: bool) -> Any:
    """Returns a custom operator of attention, with its backward's.

    Its arguments:

    - ``q``, ``k``, ``v``: queries [B, H, P, D], keys [B, K, P, D] and values [B, K, P, E].
    - ``sinks``: score of each head's attention sink, [H]; None without sinks.
    - ``ticket``: number of the batch; see :func:`issue`.
    - ``seed``: seed of dropout, an int64 scalar, the same on all ranks; None without dropout.
    - ``scale``, ``softcap``: factor of scores, and their soft bound; None for none.
    - ``window``: number of tokens that a token sees, itself included; None for all before it.
    - ``dropout``: rate of weights that are dropped.

    It raises a DloError if no batch has been sharded, or the shapes are not those of the sharded batch.

    Args:
        name: Name of the operator.
        is_full: Whether queries and keys have the positions of all ranks, as :mod:`dlo_plugins.context.ulysses` gathers
            them, instead of those of this rank, as :mod:`dlo_plugins.context.ring` sends them round.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
        what, ring = _attention(q, k, is_full, *settings)
        return full_forward(q, k, v, what, sinks) if is_full else ring_forward(q, k, v, what, ring, sinks)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *settings: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        what, ring = _attention(q, k, is_full, *settings)
        tensors = grad, q, k, v, out, lse
        return _unalias(full_backward(*tensors, what) if is_full else ring_backward(*tensors, what, ring))

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
    q, k, v, sinks, ticket, seed, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, ticket, seed)


ring_attention = _make_operator("ring_attention", is_full=False)
full_attention = _make_operator("full_attention", is_full=True)
