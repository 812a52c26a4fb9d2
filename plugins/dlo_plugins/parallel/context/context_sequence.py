"""Shared sequence of a model's ranks: shards of the batch, the documents of the current one, and its attention."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.batches import FULL_POSITIONS, ROW_PLACES
from dlo_framework.models.attention.attention_mask import AttentionMask, LocalHeads
from dlo_framework.models.autocast import autocast_dtype
from dlo_plugins.parallel.context import sequence_layout
from dlo_plugins.parallel.context.block_attention import Score
from dlo_plugins.parallel.context.sequence_layout import (
    CountedTensor,
    Documents,
    SparseMask,
    count_ends,
    find_documents,
    read_counts,
)
from dlo_plugins.parallel.context.shared_attention import (
    Ring,
    SharedAttention,
    chunk_count,
    describe_attention,
    full_attention,
    issue,
    ring_attention,
    ulysses_attention,
)

_log = logging.getLogger(__name__)

Method = Literal["ring", "ulysses"]
#: Seeds of dropout are drawn from this many.
SEEDS = 2**48


class ContextSequence:
    """Sequence that ranks share, for all attention modules of a model.

    Args:
        group: Process group of the ranks.
        method: Method: `ring` or `ulysses`.

    Attributes:
        ring: Ring of the ranks; its `elements` count the sent elements.
        current: Documents of the rows of the next forward; None before the first batch.
    """

    def __init__(self, group: dist.ProcessGroup | None, method: Method = "ring") -> None:
        self.method, self.ring = method, Ring(group)
        self._batch: Documents | None = None
        #: Rows of the next forward.
        self.rows = 0
        self.current: Documents | None = None
        #: Tickets of the batch's rows: what compiled code knows of the documents (:mod:`shared_attention`).
        self._tickets: dict[tuple[int, int] | None, Tensor] = {}
        self._ticket = issue(self.ring, None)
        self._has_padded = False
        #: Whether shards of batches have the positions of the full sequence too.
        self.keeps_positions = False
        #: Sparse mask of all attention modules; None without one.
        self.sparse: SparseMask | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextSequence:
        return self  # A copy of the model uses the same ranks; process groups cannot be copied.

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's shard of a batch, and keeps its documents for the attention until the next call.

        Args:
            batch: Batch, the same on all ranks: `input_ids` [B, L] and other tensors of this shape are sharded, the
                rest does not change.

        Raises:
            DloError: If the batch has no `input_ids` [B, L], or its attention mask has another shape.
        """
        whole = sequence_layout.pad_batch(batch, self.ring.size)
        ids = whole["input_ids"]
        if ids.shape != batch["input_ids"].shape and not self._has_padded:
            self._has_padded = True
            _log.info(
                "context parallelism: sequences of %d tokens are padded to %d, a multiple of 2 x cp; the padding has no"
                " target and is masked",
                batch["input_ids"].shape[1],
                ids.shape[1],
            )
        mask = whole.get("attention_mask")
        chunks = self._chunks(ids.shape[1])
        described = _document_tensors(batch)
        if described:
            self._batch = find_documents(whole["position_ids"], mask, chunks, read_counts(described))
        else:  # One document in each row; its tokens do not see the padding after it.
            self._batch = Documents(ids.shape[1], chunks)
        self._batch.sparse = self.sparse
        self.current, self.rows = self._batch, len(ids)
        self._ticket = issue(self.ring, self._batch)
        self._tickets = {None: self._ticket}
        shard = {
            name: sequence_layout.shard_sequence(value, self.ring.rank, self.ring.size)
            if sequence_layout.in_sequence(value, ids)
            else value
            for name, value in whole.items()
        }
        if self._batch.prefix:
            places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
            shard[ROW_PLACES] = sequence_layout.shard_sequence(places, self.ring.rank, self.ring.size)
        if self.keeps_positions:
            shard[FULL_POSITIONS] = sequence_layout.continued_positions(batch, ids)
        return shard

    def with_counts(self, batch: Any) -> Any:
        """Returns a batch with the counts that :meth:`shard` would otherwise read from the device.

        Args:
            batch: Batch of the loader; one that is not on the CPU does not change.

        Raises:
            DloError: If :meth:`shard` would raise.
        """
        described = _document_tensors(batch)
        if type(batch) is not dict:  # No other kind of mapping is copied here: `shard` counts then.
            return batch
        if not described or any(tensor.device.type != "cpu" or tensor.ndim != 2 for tensor in described):
            return batch
        names = ("input_ids", "position_ids", "attention_mask")
        whole = sequence_layout.pad_batch(
            {name: batch[name] for name in names if batch.get(name) is not None}, self.ring.size
        )
        chunks = self._chunks(whole["input_ids"].shape[1])
        ends = count_ends(whole["position_ids"], whole.get("attention_mask"), chunks)
        more = {
            name: CountedTensor.attach(batch[name], ends) for name in names[1:] if isinstance(batch.get(name), Tensor)
        }
        return {**batch, **more}

    def set_mask(self, mask: AttentionMask, heads: LocalHeads | None) -> None:
        """Sets the sparse mask of the attention, cut to the heads that this rank computes.

        Args:
            mask: Mask of the attention modules.
            heads: Heads that tensor parallelism leaves to this rank; None for all.
        """
        if self.method == "ulysses":
            first, count = heads or LocalHeads(0, mask.num_heads)
            count //= self.ring.size
            heads = LocalHeads(first + self.ring.rank * count, count)
        self.sparse = SparseMask(mask, heads)

    def _chunks(self, length: int) -> int:
        """Returns the number of chunks of a sequence."""
        chunks = 2 * self.ring.size
        return chunk_count(length, chunks) if self.method == "ulysses" else chunks

    def select_rows(self, first: int, count: int) -> None:
        """Selects the rows of the batch in a pipeline's next micro-batch.

        Call it before each forward of a micro-batch, and before its backward if activations are recomputed.
        """
        assert self._batch is not None
        self.current, self.rows = self._batch.rows(first, count), count
        if (first, count) not in self._tickets:
            self._tickets[first, count] = issue(self.ring, self.current)
        self._ticket = self._tickets[first, count]

    @property
    def selection(self) -> tuple[Documents | None, int, Tensor]:
        """What :meth:`select_rows` has selected; set it to continue with a micro-batch."""
        return self.current, self.rows, self._ticket

    @selection.setter
    def selection(self, selected: tuple[Documents | None, int, Tensor]) -> None:
        self.current, self.rows, self._ticket = selected

    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """Returns the full tensor from the ranks' shards, in the order of the sequence; without gradients."""
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self.ring.size)]
        dist.all_gather(parts, part, group=self.ring.group)
        return sequence_layout.concat_shards(parts, dim)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score: Score,
        window: int | None,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns the output of this rank's queries, [B, H, L / ranks, E].

        Args:
            q: Queries of this rank, [B, H, L / ranks, D].
            k: Keys of this rank, [B, K, L / ranks, D].
            v: Values of this rank, [B, K, L / ranks, E].
            score: Score function.
            window: Number of tokens that a token sees, including itself; None for all before it.
            dropout: Rate of weights that are dropped.
            sinks: Score of each head's attention sink, [H]; None without sinks.

        Raises:
            DloError: If no batch has been sharded, or the shapes are not those of the sharded batch.
        """
        dtype = autocast_dtype(q.device.type) or v.dtype
        in_graph, is_full, ring = torch.compiler.is_compiling(), self.method == "ulysses", self.ring
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        # Recomputation restores the common random numbers that it is drawn from.
        seed = torch.randint(SEEDS, ()) if dropout else None
        what = None if in_graph else describe_attention(q, k, ring, self.current, score, window, dropout, seed)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if what is not None:
                return SharedAttention.apply(q, k, v, sinks, what, None if is_full else ring)
            operator = full_attention if is_full else ring_attention
            return operator(q, k, v, sinks, self._ticket, seed, score.scale, score.softcap, window, dropout)[0]

        if not is_full:
            return attend(q, k, v)
        sinks = None if sinks is None else sinks.chunk(ring.size)[ring.rank]  # Of this rank's heads.
        return ulysses_attention(q, k, v, attend, ring)


def _document_tensors(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch that describe its documents and padding."""
    if not isinstance(batch, dict) or not isinstance(batch.get("input_ids"), Tensor):
        return []
    return [batch[name] for name in ("position_ids", "attention_mask") if isinstance(batch.get(name), Tensor)]
