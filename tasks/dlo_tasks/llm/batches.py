"""Makes batches of documents: packed into windows, or padded; and of prompts.

A training batch is a dict of int64 tensors [B, L]: ``input_ids``; ``labels``, the token that follows each one, -100
where none is learned; ``position_ids``, which begin again at 0 with each document. Without an attention mask,
transformers takes positions that begin again for documents that must not see each other, and makes the
block-diagonal causal mask (transformers 5, ``masking_utils.find_packed_sequence_indices``). Flash kernels take no mask:
see :func:`dlo_tasks.llm.families.lengths_of_documents`. Padding stands on the right, where a causal model never looks
back at it, so that padded batches need no mask either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dlo_framework.data import Draw
from dlo_tasks.llm.packing import Packing, Pieces
from dlo_tasks.llm.token_cache import TokenStore

IGNORED = -100
"""The label of a position that has no target: torch's and transformers' ``ignore_index``."""

#: Padded lengths are multiples of this, which suits matrix units and keeps the number of shapes low.
MULTIPLE = 8

Batch = dict[str, torch.Tensor]


class StepDraws(list[Draw]):
    """The samples of one batch on this rank, with what only the whole step knows.

    Attributes:
        tokens_in_step: targets of the optimizer step, over all ranks and micro-batches; None where nobody knows yet.
        length: positions of the longest sample of the batch, over all ranks; None for windows of one length.
    """

    tokens_in_step: int | None = None
    length: int | None = None


class PackedWindows:
    """Windows of a fixed length, each filled with whole pieces.

    Args:
        store: the tokens.
        pieces: which are in use.
        packing: where each lies.
        seq_len: positions of a window.
        filler: the id at unused positions.
        targets: int64 [P], learned targets of each piece.
    """

    def __init__(
        self, store: TokenStore, pieces: Pieces, packing: Packing, seq_len: int, filler: int, targets: np.ndarray
    ) -> None:
        order = np.lexsort((packing.offset, packing.window))
        self._store, self._seq_len, self._filler = store, seq_len, filler
        self._start, self._length = pieces.start[order], pieces.length[order]
        self._offset = packing.offset[order]
        self._first = np.searchsorted(packing.window[order], np.arange(packing.windows + 1))
        #: int64 [windows], of each window.
        self.targets = np.bincount(packing.window, targets, packing.windows).astype(np.int64)
        #: No lengths: all windows are equally long.
        self.lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._first) - 1

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of these windows."""
        first = self._first[[draw.index for draw in draws]]
        past = self._first[[draw.index + 1 for draw in draws]]
        pieces = np.concatenate([np.arange(a, b) for a, b in zip(first, past, strict=True)])
        row = np.repeat(np.arange(len(draws)), past - first)
        begin = row * self._seq_len + self._offset[pieces]
        shape = len(draws), self._seq_len
        batch = gather(self._store, self._start[pieces], self._length[pieces], begin, shape, self._filler)
        return _finish(batch, draws)


class PaddedSamples:
    """Pieces one by one, padded to the longest of the batch.

    Args:
        store: the tokens.
        pieces: which are in use.
        seq_len: the most positions that a padded batch has.
        filler: the id at unused positions.
        targets: int64 [P], learned targets of each piece.
    """

    def __init__(self, store: TokenStore, pieces: Pieces, seq_len: int, filler: int, targets: np.ndarray) -> None:
        self._store, self._seq_len, self._filler = store, seq_len, filler
        self._start, self.targets = pieces.start, targets
        #: int64 [P], positions of each sample.
        self.lengths: np.ndarray | None = pieces.length

    def __len__(self) -> int:
        return len(self._start)

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns the batch of these samples."""
        assert self.lengths is not None
        index = np.array([draw.index for draw in draws])
        length = self.lengths[index]
        longest = getattr(draws, "length", None) or int(length.max())
        width = min(-(-longest // MULTIPLE) * MULTIPLE, self._seq_len)
        begin = np.arange(len(draws)) * width
        batch = gather(self._store, self._start[index], length, begin, (len(draws), width), self._filler)
        return _finish(batch, draws)


class Prompts:
    """Prompts to complete, padded on the left.

    Args:
        prompts: the token ids of each.
        filler: the id at unused positions.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], filler: int) -> None:
        self._prompts, self._filler = prompts, filler

    def __len__(self) -> int:
        return len(self._prompts)

    def fetch(self, draws: list[Draw]) -> Batch:
        """Returns ``input_ids`` and ``attention_mask``, int64 [B, L], and the prompts' numbers ``index``, int64 [B]."""
        rows = [self._prompts[draw.index] for draw in draws]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self._filler)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, width - len(row) :] = torch.tensor(row)
            mask[number, width - len(row) :] = 1
        index = torch.tensor([draw.index for draw in draws])
        return {"input_ids": ids, "attention_mask": mask, "index": index}


def gather(
    store: TokenStore,
    start: np.ndarray,
    length: np.ndarray,
    begin: np.ndarray,
    shape: tuple[int, int],
    filler: int,
) -> Batch:
    """Returns pieces laid out in a batch.

    Args:
        store: the tokens.
        start: int64 [P], the place of each piece's first token in the store.
        length: int64 [P], its positions.
        begin: int64 [P], ascending: where its first position lies in the flattened batch.
        shape: of the batch.
        filler: the id at positions of no piece; they have no label, and continue the positions of the row's last piece.
            A document of nothing but padding is all zeros in a model whose embedding of it is zero, and has NaN for
            a gradient where a standard deviation is computed (Gemma 3n).
    """
    ends = np.cumsum(length)
    within = np.arange(int(ends[-1])) - np.repeat(ends - length, length)
    source = np.repeat(start, length) + within
    target = np.repeat(begin, length) + within
    size = shape[0] * shape[1]
    ids = np.full(size, filler, dtype=np.int64)
    labels = np.full(size, IGNORED, dtype=np.int64)
    positions = _unused_positions(begin, shape)
    ids[target] = store.read(source)[0]
    following, learned = store.read(source + 1)
    labels[target] = np.where(learned, following, IGNORED)
    positions[target] = within
    flat = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.from_numpy(values).view(shape) for name, values in flat.items()}


def _unused_positions(begin: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Returns int64 [size]: positions that continue each row's last piece; what lies under pieces is of no meaning."""
    last = np.zeros(shape[0], dtype=np.int64)
    np.maximum.at(last, begin // shape[1], begin % shape[1])
    return (np.arange(shape[1])[None] - last[:, None]).ravel()


def _finish(batch: Batch, draws: list[Draw]) -> Batch:
    tokens = getattr(draws, "tokens_in_step", None)
    if tokens is not None:
        batch["tokens_in_step"] = torch.tensor(tokens)
    return batch
