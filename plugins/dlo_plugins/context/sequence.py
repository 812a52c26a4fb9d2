"""A model's share in a sequence: who holds which part, the batch that is under way, and how attention is computed."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_plugins.context import layout
from dlo_plugins.context.blockwise import Attention
from dlo_plugins.context.kernels import Dropout, Score
from dlo_plugins.context.ring import Ring, RingAttention
from dlo_plugins.context.ulysses import attend_by_heads, whole_chunks
from dlo_plugins.context.visibility import CountedTensor, Documents, attached, count, documents_of

_log = logging.getLogger(__name__)

Method = Literal["ring", "ulysses"]


class SharedSequence:
    """The sequence that ranks share, for all attention modules of a model.

    Args:
        group: the ranks' process group.
        method: `ring` or `ulysses`.

    Attributes:
        ring: the ranks; its `elements` count what has been sent.
    """

    def __init__(self, group: dist.ProcessGroup | None, method: Method = "ring") -> None:
        self.method, self.ring = method, Ring(group)
        self._batch: Documents | None = None
        self._current: Documents | None = None
        self._has_padded = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedSequence:
        return self  # A copy of the model talks to the same ranks; process groups cannot be copied.

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a batch, and notes its documents for the attention until the next one.

        Args:
            batch: the same on all ranks: `input_ids` [B, L] and what else is of that shape is cut, the rest stays.

        Raises:
            DloError: for a batch without `input_ids` [B, L], and an attention mask of another shape.
        """
        whole = layout.prepare(batch, self.ring.size)
        ids = whole["input_ids"]
        if ids.shape != batch["input_ids"].shape and not self._has_padded:
            self._has_padded = True
            _log.info(
                "context parallelism: sequences of %d are padded to %d, a multiple of 2 x cp; the padding has no"
                " target and is not seen",
                batch["input_ids"].shape[1],
                ids.shape[1],
            )
        mask = whole.get("attention_mask")
        chunks = self._chunks(ids.shape[1])
        given = _describing(batch)
        if given:
            self._batch = documents_of(whole["position_ids"], mask, chunks, attached(given))
        else:  # One document a row; the padding behind it is seen by none of its tokens.
            self._batch = Documents(ids.shape[1], chunks)
        self._current = self._batch
        return {
            name: layout.take_chunks(value, self.ring.rank, self.ring.size) if layout.in_sequence(value, ids) else value
            for name, value in whole.items()
        }

    def counted(self, batch: Any) -> Any:
        """Returns a batch that takes with it to the device what :meth:`shard` would wait for the device for.

        Args:
            batch: as the loader gives it; one that is not on the CPU stays as it is.

        Raises:
            DloError: as :meth:`shard`.
        """
        given = _describing(batch)
        if type(batch) is not dict:  # Another kind of mapping is not built anew here: `shard` counts.
            return batch
        if not given or any(tensor.device.type != "cpu" or tensor.ndim != 2 for tensor in given):
            return batch
        names = ("input_ids", "position_ids", "attention_mask")
        whole = layout.prepare({name: batch[name] for name in names if batch.get(name) is not None}, self.ring.size)
        chunks = self._chunks(whole["input_ids"].shape[1])
        ends = count(whole["position_ids"], whole.get("attention_mask"), chunks)
        told = {name: CountedTensor.of(batch[name], ends) for name in names[1:] if isinstance(batch.get(name), Tensor)}
        return {**batch, **told}

    def _chunks(self, length: int) -> int:
        """Returns into how many chunks a sequence is cut."""
        chunks = 2 * self.ring.size
        return whole_chunks(length, chunks) if self.method == "ulysses" else chunks

    def select_rows(self, first: int, count: int) -> None:
        """Says which rows of the batch the model is given from now on: those of a micro-batch of a pipeline.

        To be called before each forward of a micro-batch, and before its backward if activations are recomputed.
        """
        assert self._batch is not None
        self._current = self._batch.rows(first, count)

    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """Returns the whole of what each rank holds a part of, in the order of the sequence; without gradients."""
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self.ring.size)]
        dist.all_gather(parts, part, group=self.ring.group)
        return layout.join_parts(parts, dim)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, score: Score, window: int | None, dropout: float = 0.0
    ) -> Tensor:
        """Returns the output of this rank's queries, [B, H, L / ranks, E].

        Args:
            q: this rank's, [B, H, L / ranks, D].
            k: this rank's, [B, K, L / ranks, D].
            v: this rank's, [B, K, L / ranks, E].
            score: how scores are made.
            window: how many tokens a token sees, itself included; None for all before it.
            dropout: rate of weights that are dropped.

        Raises:
            DloError: if no batch has been shared, or another one is given.
        """
        documents = self._current
        if documents is None:
            raise DloError(
                "context parallelism: the model was given a batch that has not been shared; pass it through"
                " shard_batch, or run the model inside `local()`"
            )
        held = documents.length // self.ring.size
        rows = None if documents.first_start is None else len(documents.first_start)
        if q.shape[2] != held or k.shape[2] != held or (rows is not None and q.shape[0] != rows):
            raise DloError(
                f"context parallelism: attention got {q.shape[0]} rows of {q.shape[2]} queries and {k.shape[2]} keys,"
                f" of the shared batch a rank holds {rows or q.shape[0]} of {held}; pass each batch through"
                " shard_batch, say which rows a micro-batch has (select_rows), and keep no cache of keys"
            )
        device, dtype = q.device.type, v.dtype
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        what = Attention(documents, score, window, self._drawn(dropout, documents) if dropout else None)
        if self.method == "ulysses":
            return attend_by_heads(q, k, v, what, self.ring)
        return RingAttention.apply(q, k, v, what, self.ring)

    def _drawn(self, rate: float, documents: Documents) -> Dropout:
        """Draws which weights are dropped, from the common random numbers, which recomputation restores.

        No pair of chunks shares a seed with another, nor do ranks that have the same chunks of other heads.
        """
        seed = int(torch.randint(2**48, ()))
        return Dropout(rate, seed + self.ring.rank * documents.chunks**2)


def _describing(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch that tell its documents and padding."""
    if not isinstance(batch, dict) or not isinstance(batch.get("input_ids"), Tensor):
        return []
    return [batch[name] for name in ("position_ids", "attention_mask") if isinstance(batch.get(name), Tensor)]
