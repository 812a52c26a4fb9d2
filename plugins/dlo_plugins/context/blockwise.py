"""Attention of chunks to chunks: pairs of them are computed one by one, and put together by their log-sum-exps.

Blockwise Parallel Transformer. Liu & Abbeel, 2023, arXiv 2305.19370; the merge is that of FlashAttention (Dao et al.,
2022, arXiv 2205.14135). Pairs of which nothing is seen are left out, which is what the causal order, windows and packed
documents save.

Shapes: B rows, H heads of queries, K heads of keys and values, S positions of a chunk, D and E widths of keys and
values. Tensors here hold some chunks one after another, [B, H, chunks * S, D].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from dlo_plugins.context import kernels
from dlo_plugins.context.kernels import Dropout, Score
from dlo_plugins.context.visibility import Documents, PairMask, Seen


@dataclass(frozen=True)
class Attention:
    """What is to be computed, apart from the tensors.

    Attributes:
        documents: of the rows at hand.
        score: how a score is made.
        window: how many tokens a token sees, itself included; None for all before it.
        dropout: of weights, its seed that of the first pair of chunks.
    """

    documents: Documents
    score: Score
    window: int | None = None
    dropout: Dropout | None = None

    def dropout_of(self, query: int, key: int) -> Dropout | None:
        """Returns the dropout of a pair of chunks."""
        if self.dropout is None:
            return None
        return replace(self.dropout, seed=self.dropout.seed + query * self.documents.chunks + key)


class Output:
    """The attention's output as it grows, pair by pair.

    Args:
        q: the queries, [B, H, chunks * S, D].
        width: E.
    """

    def __init__(self, q: Tensor, width: int) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.dtype = q.dtype
        rows, heads, positions = q.shape[:3]
        # In memory [B, positions, H, E], which is how the output projection takes it.
        self.sum = q.new_zeros((rows, positions, heads, width), dtype=dtype).transpose(1, 2)
        self.lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        self._begun: set[tuple[int, int]] = set()

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Adds what some queries have seen elsewhere: their output there, and its log-sum-exp.

        Args:
            rows: of the queries; of two calls the same, or others altogether.
            out: [B, H, rows, E].
            lse: [B, H, rows]; minus infinity, with an output of zeros, for what has seen nothing.
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


def merge(total: Tensor, known: Tensor, out: Tensor, lse: Tensor) -> None:
    """Adds a block to the output of others, in place: one pass over the outputs.

    With weights `exp(known)` and `exp(lse)` the mean of both outputs is `total + w (out - total)`, and
    `w = 1 / (1 + exp(known - lse))`. Nothing here breaks a graph that torch.compile traces.

    Args:
        total: [B, H, S, E] in float32 at least, changed.
        known: its log-sum-exp [B, H, S], changed.
        out: [B, H, S, E] of the block, in any precision.
        lse: its log-sum-exp [B, H, S].
    """
    lse = lse.to(known.dtype)
    # Where neither has seen anything both outputs are zeros, and any weight does.
    weight = torch.sigmoid(lse - known).nan_to_num_(0.0)
    total.lerp_(out.to(total.dtype), weight[..., None])
    known.copy_(torch.logaddexp(known, lse))


def attend(
    what: Attention, out: Output, q: Tensor, queries: Sequence[int], k: Tensor, v: Tensor, keys: Sequence[int]
) -> None:
    """Adds to the output what some chunks of queries see of some chunks of keys.

    Args:
        what: the attention.
        out: of these queries; added to.
        q: [B, H, chunks * S, D].
        queries: numbers of their chunks.
        k: [B, K, chunks * S, D].
        v: [B, K, chunks * S, E].
        keys: numbers of their chunks.
    """
    for rows, columns, causal, mask, dropout in _pairs(what, queries, keys, q.device):
        held = k[:, :, columns], v[:, :, columns]
        part = kernels.forward(q[:, :, rows], *held, what.score, causal, mask, dropout)
        out.add(rows, *part)


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
    """Adds the gradients of some chunks of queries and of keys that come of their seeing each other.

    Args:
        what: the attention.
        grad: gradient of the output, [B, H, chunks * S, E].
        out: the whole output of these queries.
        lse: the whole log-sum-exp of these queries, [B, H, chunks * S].
        q: as in :func:`attend`, as are the following.
        queries: same.
        k: same.
        v: same.
        keys: same.
        into: gradients of q, k and v, added to.
    """
    dq, dk, dv = into
    for rows, columns, causal, mask, dropout in _pairs(what, queries, keys, q.device):
        part = kernels.backward(
            grad[:, :, rows],
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            out[:, :, rows],
            lse[:, :, rows],
            what.score,
            causal,
            mask,
            dropout,
        )
        dq[:, :, rows] += part[0]
        dk[:, :, columns] += part[1]
        dv[:, :, columns] += part[2]


def _pairs(
    what: Attention, queries: Sequence[int], keys: Sequence[int], device: torch.device
) -> Iterator[tuple[slice, slice, bool, PairMask | None, Dropout | None]]:
    """Yields the pairs to compute: where queries and keys are, whether they are causal, their mask and dropout.

    On the meta device there are none.
    """
    if device.type == "meta":
        return
    size = what.documents.size
    for at, query in enumerate(queries):
        rows = slice(at * size, (at + 1) * size)
        seen = [what.documents.seen(query, key, what.window) for key in keys]
        for kind, run in groupby(range(len(keys)), key=seen.__getitem__):
            places = list(run)
            if kind is Seen.NOTHING:
                continue
            # Chunks that are wholly seen are one block; any other is a block of its own.
            for first, last in [(places[0], places[-1])] if kind is Seen.ALL else [(to, to) for to in places]:
                columns = slice(first * size, (last + 1) * size)
                mask = what.documents.mask(query, keys[first], what.window, device) if kind is Seen.SOME else None
                yield rows, columns, kind is Seen.CAUSAL, mask, what.dropout_of(query, keys[first])
