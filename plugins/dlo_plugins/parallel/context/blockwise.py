"""Blockwise attention: computes pairs of chunks one by one and merges their outputs by their log-sum-exps.

Blockwise Parallel Transformer. Liu & Abbeel, 2023, arXiv 2305.19370; the merge is that of FlashAttention (Dao et al.,
2022, arXiv 2205.14135). Pairs in which no query sees a key are skipped: the causal order, windows and packed documents
save this work.

Shapes: B rows, H heads of queries, K heads of keys and values, S positions of a chunk, D and E widths of keys and
values. Tensors contain several chunks one after another, [B, H, chunks * S, D].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from dlo_plugins.parallel.context import block_attention
from dlo_plugins.parallel.context.block_attention import Block, Dropout, Result, Score
from dlo_plugins.parallel.context.visibility import Documents, Visibility


@dataclass(frozen=True)
class Attention:
    """Parameters of an attention, apart from its tensors.

    Attributes:
        documents: Documents of the rows of the tensors.
        score: Score function of a query and a key.
        window: Number of tokens that a token sees, itself included; None for all before it.
        dropout: Dropout of weights, with the seed of the first pair of chunks; None without dropout.
    """

    documents: Documents
    score: Score
    window: int | None = None
    dropout: Dropout | None = None

    def dropout_of(self, query: int, key: int) -> Dropout | None:
        """Returns the dropout of a pair of chunks; None without dropout."""
        if self.dropout is None:
            return None
        return replace(self.dropout, seed=self.dropout.seed + query * self.documents.chunks + key)


class MergedOutput:
    """Output of an attention, to which blocks are added one by one.

    Args:
        q: Queries, [B, H, chunks * S, D].
        width: Width of the values, E.
    """

    def __init__(self, q: Tensor, width: int) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.dtype = q.dtype
        rows, heads, positions = q.shape[:3]
        # In memory [B, positions, H, E], as the output projection reads it.
        self.sum = q.new_zeros((rows, positions, heads, width), dtype=dtype).transpose(1, 2)
        self.lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        self._begun: set[tuple[int, int]] = set()

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Adds a block: the output of some queries over some keys, and its log-sum-exp.

        Args:
            rows: Slice of the queries; the slices of two calls must be equal or disjoint.
            out: Output of these queries, [B, H, rows, E].
            lse: Log-sum-exp, [B, H, rows]; minus infinity, with an output of zeros, for a query that sees no key.
        """
        total, known = self.sum[:, :, rows], self.lse[:, :, rows]
        if (rows.start, rows.stop) in self._begun:
            merge(total, known, out, lse)
        else:
            self._begun.add((rows.start, rows.stop))
            total.copy_(out)
            known.copy_(lse)

    def value(self) -> Tensor:
        """Returns the output in the queries' dtype."""
        return self.sum.to(self.dtype)


def add_sinks(out: MergedOutput, sinks: Tensor | None) -> None:
    """Adds attention sinks: each head has one more score, to which no value belongs (gpt_oss).

    The sum of exponentials grows by the sink's, so with `w = exp(lse) / (exp(lse) + exp(sink))` outputs become `w out`.
    With the new log-sum-exp, the backward of blocks needs no change.

    Args:
        out: Output, merged over all blocks; changed in place.
        sinks: Score of each head, [H]; None without sinks.
    """
    if sinks is None:
        return
    score = sinks.to(out.lse.dtype)[None, :, None]
    out.sum.mul_(torch.sigmoid(out.lse - score)[..., None])
    out.lse.copy_(torch.logaddexp(out.lse, score))


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Returns the gradient of sinks, [H]; None without sinks.

    Args:
        grad: Gradient of the output, [B, H, S, E].
        out: Output, with the sinks, [B, H, S, E].
        lse: Log-sum-exp, with the sinks, [B, H, S].
        sinks: Score of each head, [H]; None without sinks.
    """
    if sinks is None:
        return None
    weight = (sinks.to(lse.dtype)[None, :, None] - lse).exp()  # The sink's value is zero.
    found = -(weight * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2))
    return found.to(sinks.dtype)


def merge(total: Tensor, known: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merges the output of a block into the output of other blocks, in place, in one pass over both.

    With weights `exp(known)` and `exp(lse)` the mean of both outputs is `total + w (out - total)`, and
    `w = 1 / (1 + exp(known - lse))`. No operation here breaks a graph that torch.compile traces.

    Args:
        total: Output of the other blocks, [B, H, S, E], in at least float32; changed in place.
        known: Log-sum-exp of `total`, [B, H, S]; changed in place.
        out: Output of the block, [B, H, S, E], in any precision.
        lse: Log-sum-exp of `out`, [B, H, S].
    """
    lse = lse.to(known.dtype)
    # Where no key is seen in either, both outputs are zeros, and any weight gives zeros.
    weight = torch.sigmoid(lse - known).nan_to_num_(0.0)
    total.lerp_(out.to(total.dtype), weight[..., None])
    known.copy_(torch.logaddexp(known, lse))


def attend(
    what: Attention, out: MergedOutput, q: Tensor, queries: Sequence[int], k: Tensor, v: Tensor, keys: Sequence[int]
) -> None:
    """Adds the attention of some chunks of queries to some chunks of keys to the output.

    Args:
        what: Attention to compute.
        out: Output of these queries; added to.
        q: Queries, [B, H, chunks * S, D].
        queries: Numbers of the queries' chunks.
        k: Keys, [B, K, chunks * S, D].
        v: Values, [B, K, chunks * S, E].
        keys: Numbers of the keys' chunks.
    """
    for rows, _, block in _blocks(what, q, queries, k, v, keys):
        out.add(rows, *block_attention.forward(block))


def attend_backward(
    what: Attention,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    queries: Sequence[int],
    k: Tensor,
    v: Tensor,
    keys: Sequence[int],
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds the gradients of the attention of some chunks of queries to some chunks of keys.

    Args:
        what: Attention of the forward.
        grad: Gradient of the output, [B, H, chunks * S, E].
        out: Output of these queries, merged over all blocks, [B, H, chunks * S, E].
        lse: Log-sum-exp of these queries, merged over all blocks, [B, H, chunks * S].
        q: Queries, as for :func:`attend`.
        queries: Numbers of the queries' chunks.
        k: Keys, as for :func:`attend`.
        v: Values, as for :func:`attend`.
        keys: Numbers of the keys' chunks.
        into: Gradients of q, k and v; added to.
    """
    dq, dk, dv = into
    for rows, columns, block in _blocks(what, q, queries, k, v, keys):
        part = block_attention.backward(block, Result(grad[:, :, rows], out[:, :, rows], lse[:, :, rows]))
        dq[:, :, rows] += part[0]
        dk[:, :, columns] += part[1]
        dv[:, :, columns] += part[2]


def _blocks(
    what: Attention, q: Tensor, queries: Sequence[int], k: Tensor, v: Tensor, keys: Sequence[int]
) -> Iterator[tuple[slice, slice, Block]]:
    """Yields the blocks to compute, each with its slices of queries and keys; nothing on the meta device."""
    if q.device.type == "meta":
        return
    size = what.documents.size
    for at, query in enumerate(queries):
        rows = slice(at * size, (at + 1) * size)
        seen = [what.documents.seen(query, key, what.window) for key in keys]
        for kind, run in groupby(range(len(keys)), key=seen.__getitem__):
            places = list(run)
            if kind is Visibility.NOTHING:
                continue
            # Consecutive chunks that are fully seen form one block; any other chunk is a block of its own.
            for first, last in [(places[0], places[-1])] if kind is Visibility.ALL else [(to, to) for to in places]:
                columns = slice(first * size, (last + 1) * size)
                pair = query, keys[first]
                mask = what.documents.mask(*pair, what.window, q.device) if kind is Visibility.SOME else None
                tensors = q[:, :, rows], k[:, :, columns], v[:, :, columns]
                is_causal = kind is Visibility.CAUSAL
                yield rows, columns, Block(*tensors, what.score, is_causal, mask, what.dropout_of(*pair))
