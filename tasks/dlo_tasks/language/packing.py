"""Splits documents into pieces that fit a window, and packs the pieces into as few windows as possible.

Packing is best-fit decreasing bin packing: the longest piece first, each into the fullest window that has space for it
(Johnson 1973, "Near-optimal bin packing algorithms"; for language models Ding et al. 2024, "Fewer Truncations Improve
Language Modeling", arXiv:2404.10830). It needs at most 11/9 of the minimum number of windows, plus one; on the lengths
of real text it leaves well under one percent empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from dlo_framework.errors import DloError

LongSamples = Literal["truncate", "split", "drop", "error"]

#: Number of pieces whose targets are counted at once.
_AT_ONCE = 1 << 16


class DocumentChunks(NamedTuple):
    """Contiguous runs of positions, each within one document.

    A position is a token with a next token in the same document: a document of n tokens has n - 1 positions.

    Attributes:
        start: Index of each piece's first token among all tokens, int64 [P].
        length: Number of positions of each piece, int64 [P]; the target of the last one is at ``start + length``.
        document: Index of each piece's document, int64 [P].
        too_long: Number of documents that were longer than the window.
        too_short: Number of documents without any position; they have no piece.
    """

    start: np.ndarray
    length: np.ndarray
    document: np.ndarray
    too_long: int
    too_short: int

    def select(self, keep: np.ndarray) -> DocumentChunks:
        """Returns the pieces for which ``keep``, bool [P], is true."""
        return self._replace(start=self.start[keep], length=self.length[keep], document=self.document[keep])


class WindowAssignment(NamedTuple):
    """Assignment of pieces to windows.

    Attributes:
        window: Window of each piece, int64 [P].
        offset: Offset of each piece's first position in its window, int64 [P].
        windows: Number of windows.
    """

    window: np.ndarray
    offset: np.ndarray
    windows: int


def cut_documents(
    bounds: np.ndarray, documents: np.ndarray, seq_len: int, long_samples: LongSamples, *, last_is_input: bool = False
) -> DocumentChunks:
    """Returns the pieces of some documents, none longer than the window.

    Args:
        bounds: Bounds of all documents, int64 [N + 1]; document i is tokens ``bounds[i]`` to ``bounds[i + 1] - 1``.
        documents: Indices of the documents to use, int64 [D].
        seq_len: Positions per window.
        long_samples: Policy for longer documents: ``truncate`` keeps their start, ``split`` makes pieces of
            ``seq_len`` and a remainder, so that each position is in one piece, ``drop`` removes them.
        last_is_input: Whether a document's last token has a position too, where targets are not the next tokens.

    Raises:
        DocumentTooLong: If a document is longer, under ``error``.
    """
    start = bounds[documents].astype(np.int64)
    last = 0 if last_is_input else 1
    length = bounds[documents + 1].astype(np.int64) - start - last
    long = length > seq_len
    too_long, too_short = int(long.sum()), int((length < 1).sum())
    if long_samples == "error" and too_long:
        number = int(documents[np.argmax(long)])
        raise DocumentTooLong(number, int(length[np.argmax(long)]) + last, seq_len + last, too_long)
    keep = length >= 1
    if long_samples == "drop":
        keep &= ~long
    start, length, document = start[keep], length[keep], documents[keep].astype(np.int64)
    if long_samples == "truncate":
        length = np.minimum(length, seq_len)
    elif long_samples == "split":
        parts = -(-length // seq_len)
        skipped = seq_len * ranges(parts)  # positions of the document before each piece [P]
        start = np.repeat(start, parts) + skipped
        length = np.minimum(np.repeat(length, parts) - skipped, seq_len)
        document = np.repeat(document, parts)
    return DocumentChunks(start, length, document, too_long, too_short)


class DocumentTooLong(DloError):
    """Raised if a document does not fit a window, and the policy is ``error``."""

    def __init__(self, document: int, tokens: int, most: int, count: int, place: str | None = None) -> None:
        self.document, self.tokens, self.most, self.count = document, tokens, most, count
        super().__init__(
            f"{place or f'document {document}'}: document must have at most {most} tokens to fit seq_len, got {tokens}"
            f" ({count} documents are longer); raise seq_len by {tokens - most}, or set long_samples to truncate, split"
            " or drop"
        )

    def with_location(self, place: str) -> DocumentTooLong:
        """Returns this error with the document's file and line."""
        return DocumentTooLong(self.document, self.tokens, self.most, self.count, place)


def count_targets(learned: np.ndarray, pieces: DocumentChunks) -> np.ndarray:
    """Returns the number of targets of each piece, int64 [P].

    Args:
        learned: Whether each token is a target, bool [T].
        pieces: Pieces in ascending order of ``start``, without overlap.
    """
    counts = np.empty(len(pieces.start), dtype=np.int64)
    for first in range(0, len(counts), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        start = pieces.start[some] + 1
        stop = start + pieces.length[some]
        base = int(start[0])
        total = np.concatenate([[0], np.cumsum(learned[base : int(stop[-1])], dtype=np.int64)])
        counts[some] = total[stop - base] - total[start - base]
    return counts


def pack_best_fit(lengths: np.ndarray, capacity: int) -> WindowAssignment:
    """Packs pieces by best-fit decreasing; equal lengths keep their order, so that the result is deterministic.

    Windows with the same free space are handled together: a length goes into all of them at once, as often as it fits.
    A million documents take a second, for any capacity.

    Args:
        lengths: Lengths of the pieces, integers [P], each from 1 to ``capacity``.
        capacity: Positions per window.

    Raises:
        DloError: If a length is out of range.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size and (lengths.min() < 1 or lengths.max() > capacity):
        raise DloError(
            f"lengths must be in 1..{capacity}, got {lengths.min()}..{lengths.max()}; cut the documents first"
        )
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    window, offset = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    edges = [*np.flatnonzero(np.diff(sorted_lengths, prepend=capacity + 1)).tolist(), len(lengths)]  # of equal lengths
    by_space: dict[int, list[np.ndarray]] = {}  # free positions -> windows
    levels: list[int] = []  # the keys of `by_space`, sorted
    windows = 0
    for first, past in pairwise(edges):
        length = int(sorted_lengths[first])
        while first < past:
            at = bisect_left(levels, length)
            if at < len(levels):
                level = levels[at]
                each = level // length  # The smallest sufficient space leaves the least.
                some, rest = _take_windows(by_space[level], -(-(past - first) // each))
                if rest:
                    by_space[level] = rest
                else:
                    del by_space[level], levels[at]
            else:
                level, each = capacity, capacity // length
                some = np.arange(windows, windows - (-(past - first) // each))
                windows += len(some)
            placed = min(len(some) * each, past - first)
            members = order[first : first + placed]
            inside = np.arange(placed) % each
            window[members] = np.repeat(some, each)[:placed]
            offset[members] = capacity - level + inside * length
            first += placed
            whole = placed // each
            _add_windows(by_space, levels, level - each * length, some[:whole])
            _add_windows(by_space, levels, level - (placed - whole * each) * length, some[whole:])
    return WindowAssignment(window, offset, windows)


def _take_windows(chunks: list[np.ndarray], count: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the first ``count`` windows of a list of arrays, or all if there are fewer, and the rest."""
    taken: list[np.ndarray] = []
    for number, chunk in enumerate(chunks):
        if count < len(chunk):
            return np.concatenate([*taken, chunk[:count]]), [chunk[count:], *chunks[number + 1 :]]
        taken.append(chunk)
        count -= len(chunk)
        if not count:
            return np.concatenate(taken), chunks[number + 1 :]
    return np.concatenate(taken), []


def _add_windows(by_space: dict[int, list[np.ndarray]], levels: list[int], level: int, windows: np.ndarray) -> None:
    if not len(windows) or not level:
        return
    if level not in by_space:
        by_space[level] = []
        insort(levels, level)
    by_space[level].append(windows)


def ranges(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ..., c - 1 for each of the counts, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
