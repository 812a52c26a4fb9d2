"""Lays documents out as samples, packed or padded, and makes batches of samples or prompts.

A training batch is a dict of int64 tensors [B, L]: ``input_ids``; ``labels``, the id of the next token, or -100 where
it is not a target; ``position_ids``, which restart at 0 with each document. Without an attention mask, transformers
reads restarting positions as separate documents and makes the block-diagonal causal mask (transformers 5,
``masking_utils.find_packed_sequence_indices``). Flash kernels take no mask: see
:func:`dlo_tasks.llm.families.flash_arguments`. Padding is on the right, where no earlier token of a causal model
attends to it, so padded batches need no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from dlo_framework.data import Draw, uniform
from dlo_framework.errors import DloError
from dlo_tasks.llm.packing import (
    DocumentChunks,
    DocumentTooLong,
    LongSamples,
    WindowAssignment,
    count_targets,
    cut_documents,
    pack_best_fit,
)
from dlo_tasks.llm.records import format_location
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
        ids, mask = pad_left([self._prompts[draw.index] for draw in draws], self._filler)
        index = torch.tensor([draw.index for draw in draws])
        return {"input_ids": ids, "attention_mask": mask, "index": index}


def pad_left(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns prompts as ids and attention mask, both `[B, L]`, padded on the left."""
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


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


# --- samples of documents -----------------------------------------------------------------------------------------

PackingName = Literal["best_fit", "none"]
_SPLIT = 3  # stream of random numbers for the split


class Statistics(NamedTuple):
    """Statistics of a layout of documents.

    Attributes:
        documents: Number of documents.
        tokens: Positions of all samples. Documents also have their last token, which is only a target, and truncated
            tokens.
        targets: Positions whose next token is a target.
        samples: Number of windows, or of padded samples.
        capacity: Positions of all windows; for padded samples, those of the samples without padding.
        longest: Positions of the longest piece.
        too_long: Number of documents longer than the window, handled by ``long_samples``.
        unused: Number of documents of fewer than two tokens.
        untaught: Number of pieces without a target, which are left out.
        packing: Value of the option ``packing``.
        long_samples: Policy for documents longer than the window.
    """

    documents: int
    tokens: int
    targets: int
    samples: int
    capacity: int
    longest: int
    too_long: int
    unused: int
    untaught: int
    packing: PackingName
    long_samples: LongSamples

    @property
    def fill(self) -> float:
        """Fraction of all positions that hold a document's token."""
        return self.tokens / max(1, self.capacity)

    def __str__(self) -> str:
        made = {"truncate": "truncated", "split": "split", "drop": "dropped", "error": "refused"}[self.long_samples]
        if self.packing == "best_fit":
            width = self.capacity // max(1, self.samples)
            shape = f"in {self.samples:,} windows of {width:,}, {self.fill:.1%} full"
        else:
            mean = self.tokens / max(1, self.samples)
            shape = f"in {self.samples:,} samples, {mean:,.0f} long on average and {self.longest:,} at most"
        left_out = [(self.unused, "without two tokens left out"), (self.untaught, "without a target left out")]
        rest = "".join(f", {count:,} {what}" for count, what in left_out if count)
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens ({self.targets:,} learned) {shape};"
            f" {self.too_long:,} too long: {made}{rest}"
        )


def split_documents(hashes: np.ndarray, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the training and the validation documents, int64, which depend on their content only.

    A document stays in its split when others are added or removed, and copies of it are in the same split.

    Args:
        hashes: Hashes of the documents' contents, uint64 [N].
        val_fraction: Expected fraction of documents to hold out.
    """
    held_out = uniform(hashes, _SPLIT) < val_fraction
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def find_val_fraction(hashes: np.ndarray) -> float | None:
    """Returns a fraction with which :func:`split_documents` leaves documents on both sides; None if there is none."""
    positions = np.unique(uniform(hashes, _SPLIT))
    if len(positions) < 2:
        return None
    for digits in range(1, 17):
        fraction = float(np.ceil(positions[0] * 10**digits + 1e-9) / 10**digits)
        if positions[0] < fraction <= positions[-1]:
            return fraction
    return None


def lay_out_samples(
    store: TokenStore,
    documents: np.ndarray,
    files: Sequence[Path],
    *,
    seq_len: int,
    packing: PackingName,
    long_samples: LongSamples | None,
    filler: int,
    by_length: bool = False,
) -> tuple[PackedWindows | PaddedSamples, Statistics]:
    """Returns documents as samples, with statistics.

    Args:
        store: Token store.
        documents: Indices of the documents in the store, int64 [D].
        files: Source files, for error messages.
        seq_len: Positions per window.
        packing: Layout, ``pack_best_fit`` or ``none``.
        long_samples: Policy, see :func:`dlo_tasks.llm.packing.cut_documents`. None splits where all tokens are
            targets, as in plain text, and truncates otherwise, because the rest of a conversation has little meaning
            without its beginning.
        filler: Id at unused positions.
        by_length: Whether to sort padded samples by length, so that batches of neighbours have little padding.

    Raises:
        DloError: If a document is too long, under ``error``, or no target is left.
    """
    policy = long_samples or ("split" if store.all_learned else "truncate")
    try:
        pieces = cut_documents(store.bounds, documents, seq_len, policy)
    except DocumentTooLong as error:
        raise error.with_location(
            format_location(files, int(store.files[error.document]), int(store.rows[error.document]))
        ) from None
    targets = pieces.length if store.all_learned else count_targets(store.learned(), pieces)
    taught = targets > 0
    untaught = int((~taught).sum())
    pieces, targets = pieces.select(taught), targets[taught]
    if not len(targets):
        raise DloError(
            f"documents must have at least one target, got none in the {len(documents)} of {_named(files)}:"
            f" {pieces.too_short} have fewer than two tokens, {pieces.too_long} do not fit seq_len {seq_len}"
            f" (long_samples: {policy}), {untaught} pieces have no target, such as an assistant's answer; check the"
            " files, or raise seq_len"
        )
    dataset: PackedWindows | PaddedSamples
    if packing == "best_fit":
        packed = pack_best_fit(pieces.length, seq_len)
        dataset = PackedWindows(store, pieces, packed, seq_len, filler, targets)
        capacity = packed.windows * seq_len
    else:
        if by_length:
            pieces, targets = _sorted_by_length(pieces, targets)
        dataset = PaddedSamples(store, pieces, seq_len, filler, targets)
        capacity = int(pieces.length.sum())
    statistics = Statistics(
        documents=len(documents),
        tokens=int(pieces.length.sum()),
        targets=int(targets.sum()),
        samples=len(dataset),
        capacity=capacity,
        longest=int(pieces.length.max()),
        too_long=pieces.too_long,
        unused=pieces.too_short,
        untaught=untaught,
        packing=packing,
        long_samples=policy,
    )
    return dataset, statistics


def _sorted_by_length(pieces: DocumentChunks, targets: np.ndarray) -> tuple[DocumentChunks, np.ndarray]:
    order = np.argsort(pieces.length, kind="stable")
    return pieces.select(order), targets[order]


def _named(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
