"""Lays documents out as samples, and says how well they fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from dlo_framework.data import uniform
from dlo_framework.errors import DloError
from dlo_tasks.llm.batches import PackedWindows, PaddedSamples
from dlo_tasks.llm.packing import LongSamples, Pieces, TooLong, best_fit, count_targets, cut
from dlo_tasks.llm.records import place
from dlo_tasks.llm.token_cache import TokenStore

PackingName = Literal["best_fit", "none"]
_SPLIT = 3  # keeps the split's random numbers apart from those of the order


class Statistics(NamedTuple):
    """What became of the documents.

    Attributes:
        documents: that were given.
        tokens: positions that the samples hold; what documents have beyond them is a last token each, which is a
            target only, and what was cut off.
        targets: positions whose next token is learned.
        samples: windows, or padded samples.
        capacity: positions of all windows together; for padded samples those of the samples themselves.
        longest: positions of the longest piece.
        too_long: documents longer than the window; ``long_samples`` is what was done about them.
        unused: documents of fewer than two tokens.
        untaught: pieces without a target, which are left out.
        packing: how.
        long_samples: likewise.
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
        """The part of all positions that a document's token stands at."""
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
    """Returns the numbers of the training and of the validation documents, int64, by their content alone.

    A document stays where it is when others come or go, and copies of it are on the same side.

    Args:
        hashes: uint64 [N], of their contents.
        val_fraction: expected part of them to hold out.
    """
    held_out = uniform(hashes, _SPLIT) < val_fraction
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def lay_out(
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
    """Returns some documents as samples.

    Args:
        store: the tokens.
        documents: int64 [D], which of its documents.
        files: that they stand in, for messages.
        seq_len: positions of a window.
        packing: ``best_fit`` or ``none``.
        long_samples: see :func:`dlo_tasks.llm.packing.cut`; None splits where all tokens are learned, as in plain
            text, and truncates else, for the rest of a conversation says little without its beginning.
        filler: the id at unused positions.
        by_length: put padded samples in the order of their lengths, so that batches of neighbours have little
            padding.

    Raises:
        DloError: on a document that is too long, under ``error``, and if nothing is left to learn.
    """
    policy = long_samples or ("split" if store.all_learned else "truncate")
    try:
        pieces = cut(store.bounds, documents, seq_len, policy)
    except TooLong as error:
        raise error.at(place(files, int(store.files[error.document]), int(store.rows[error.document]))) from None
    targets = pieces.length if store.all_learned else count_targets(store.learned(), pieces)
    taught = targets > 0
    untaught = int((~taught).sum())
    pieces, targets = pieces.only(taught), targets[taught]
    if not len(targets):
        raise DloError(
            f"no token is left to learn of {len(documents)} documents in {_named(files)}: {pieces.too_short} have fewer"
            f" than two tokens, {pieces.too_long} do not fit seq_len {seq_len} (long_samples: {policy}), {untaught}"
            " pieces have no target, such as an assistant's answer; check the files, or raise seq_len"
        )
    dataset: PackedWindows | PaddedSamples
    if packing == "best_fit":
        packed = best_fit(pieces.length, seq_len)
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


def _sorted_by_length(pieces: Pieces, targets: np.ndarray) -> tuple[Pieces, np.ndarray]:
    order = np.argsort(pieces.length, kind="stable")
    return pieces.only(order), targets[order]


def _named(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
