"""Makes batches of packed windows, padded documents, or prompts.

A training batch is a dict of int64 tensors [B, L]: ``input_ids``; ``labels``, the id of the next token, or -100 where
it is not a target; ``position_ids``, which restart at 0 with each document. Without an attention mask, transformers
reads restarting positions as separate documents and makes the block-diagonal causal mask (transformers 5,
``masking_utils.find_packed_sequence_indices``). Flash kernels take no mask: see
:func:`dlo_tasks.llm.families.flash_arguments`. Padding is on the right, where no earlier token of a causal model
attends to it, so padded batches need no mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dlo_framework.data import Draw
from dlo_tasks.llm.packing import DocumentChunks, WindowAssignment
from dlo_tasks.llm.token_cache import TokenStore

IGNORE_INDEX = -100
"""Label of a position without a target: the ``ignore_index`` of torch and transformers."""

#: Multiple of padded lengths, for matrix units and few different shapes.
MULTIPLE = 8

Batch = dict[str, torch.Tensor]


class StepDraws(list[Draw]):
    """Samples of one batch on this rank, with totals over the optimizer step.

    Attributes:
        tokens_in_step: Number of targets of the optimizer step, over all ranks and micro-batches; None if unknown.
        pairs_in_step: Number of preferences of the optimizer step, over all ranks and micro-batches; None if unknown,
            and for other data.
        length: Positions of the longest sample of the batch, over all ranks; None for windows of equal length.
    """

    tokens_in_step: int | None = None
    pairs_in_step: int | None = None
    length: int | None = None


class PackedWindows:
    """Dataset of windows of equal length, each filled with full pieces.

    Args:
        store: Token store.
        pieces: Pieces to use.
        packing: Window and offset of each piece.
        seq_len: Positions per window.
        filler: Id at unused positions.
        targets: Number of targets of each piece, int64 [P].
    """

    def __init__(
        self,
        store: TokenStore,
        pieces: DocumentChunks,
        packing: WindowAssignment,
        seq_len: int,
        filler: int,
        targets: np.ndarray,
    ) -> None:
        order = np.lexsort((packing.offset, packing.window))
        self._store, self._seq_len, self._filler = store, seq_len, filler
        self._start, self._length = pieces.start[order], pieces.length[order]
        self._offset = packing.offset[order]
        self._first = np.searchsorted(packing.window[order], np.arange(packing.windows + 1))
        #: Number of targets of each window, int64 [windows].
        self.targets = np.bincount(packing.window, targets, packing.windows).astype(np.int64)
        #: None: all windows have the same length.
        self.lengths: np.ndarray | None = None
        #: Number of preferences of each sample; None for other data.
        self.pairs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._first) - 1

    def count_targets(self, index: np.ndarray) -> np.ndarray:
        """Returns the number of targets of windows, int64 of the shape of ``index``."""
        return self.targets[index]

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of the drawn windows."""
        first = self._first[[draw.index for draw in draws]]
        past = self._first[[draw.index + 1 for draw in draws]]
        pieces = np.concatenate([np.arange(a, b) for a, b in zip(first, past, strict=True)])
        row = np.repeat(np.arange(len(draws)), past - first)
        begin = row * self._seq_len + self._offset[pieces]
        shape = len(draws), self._seq_len
        batch = gather_pieces(self._store, self._start[pieces], self._length[pieces], begin, shape, self._filler)
        return finish(batch, draws)


class PaddedSamples:
    """Dataset of single pieces, padded to the longest of the batch.

    Args:
        store: Token store.
        pieces: Pieces to use.
        seq_len: Maximum positions of a padded batch.
        filler: Id at unused positions.
        targets: Number of targets of each piece, int64 [P].
    """

    def __init__(
        self, store: TokenStore, pieces: DocumentChunks, seq_len: int, filler: int, targets: np.ndarray
    ) -> None:
        self._store, self._seq_len, self._filler = store, seq_len, filler
        self._start, self.targets = pieces.start, targets
        #: Positions of each sample, int64 [P].
        self.lengths: np.ndarray | None = pieces.length
        #: Number of preferences of each sample; None for other data.
        self.pairs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._start)

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of the drawn samples."""
        assert self.lengths is not None
        index = np.array([draw.index for draw in draws])
        length = self.lengths[index]
        longest = getattr(draws, "length", None) or int(length.max())
        width = min(-(-longest // MULTIPLE) * MULTIPLE, self._seq_len)
        begin = np.arange(len(draws)) * width
        batch = gather_pieces(self._store, self._start[index], length, begin, (len(draws), width), self._filler)
        return finish(batch, draws)


class Prompts:
    """Dataset of prompts to complete, padded on the left.

    Args:
        prompts: Token ids of each prompt.
        filler: Id at unused positions.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], filler: int) -> None:
        self._prompts, self._filler = prompts, filler

    def __len__(self) -> int:
        return len(self._prompts)

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns ``input_ids`` and ``attention_mask``, int64 [B, L], and ``index``, the prompt numbers, int64 [B]."""
        rows = [self._prompts[draw.index] for draw in draws]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self._filler)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, width - len(row) :] = torch.tensor(row)
            mask[number, width - len(row) :] = 1
        index = torch.tensor([draw.index for draw in draws])
        return {"input_ids": ids, "attention_mask": mask, "index": index}


def gather_pieces(
    store: TokenStore,
    start: np.ndarray,
    length: np.ndarray,
    begin: np.ndarray,
    shape: tuple[int, int],
    filler: int,
) -> Batch:
    """Returns a batch with pieces at given places.

    Args:
        store: Token store.
        start: Index of each piece's first token in the store, int64 [P].
        length: Positions of each piece, int64 [P].
        begin: Index of each piece's first position in the flattened batch, int64 [P], ascending.
        shape: Shape of the batch.
        filler: Id at unused positions, which have no label and continue the positions of the row's last piece. As a
            document of its own, padding would be all zeros in a model whose padding embedding is zero, and a
            standard deviation would have the gradient NaN (Gemma 3n).
    """
    ends = np.cumsum(length)
    within = np.arange(int(ends[-1])) - np.repeat(ends - length, length)
    source = np.repeat(start, length) + within
    target = np.repeat(begin, length) + within
    size = shape[0] * shape[1]
    ids = np.full(size, filler, dtype=np.int64)
    labels = np.full(size, IGNORE_INDEX, dtype=np.int64)
    positions = unused_positions(begin, shape)
    ids[target] = store.read(source)[0]
    following, learned = store.read(source + 1)
    labels[target] = np.where(learned, following, IGNORE_INDEX)
    positions[target] = within
    flat = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.from_numpy(values).view(shape) for name, values in flat.items()}


def unused_positions(begin: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Returns positions that continue each row's last piece, int64 [size]; values under pieces are overwritten."""
    last = np.zeros(shape[0], dtype=np.int64)
    np.maximum.at(last, begin // shape[1], begin % shape[1])
    return (np.arange(shape[1])[None] - last[:, None]).ravel()


def finish(batch: Batch, draws: list[Draw]) -> Batch:
    """Returns the batch with the totals of its optimizer step that are known."""
    for name in ("tokens_in_step", "pairs_in_step"):
        total = getattr(draws, name, None)
        if total is not None:
            batch[name] = torch.tensor(total)
    return batch
