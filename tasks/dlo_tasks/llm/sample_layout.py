"""Lays documents out as samples, packed or padded, with statistics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from dlo_framework.data import uniform
from dlo_framework.errors import DloError
from dlo_tasks.llm.batches import PackedWindows, PaddedSamples
from dlo_tasks.llm.packing import (
    DocumentChunks,
    DocumentTooLong,
    LongSamples,
    count_targets,
    cut_documents,
    pack_best_fit,
)
from dlo_tasks.llm.records import format_location
from dlo_tasks.llm.token_cache import TokenStore

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
