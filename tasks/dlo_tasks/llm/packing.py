"""Cuts documents into pieces that fit a window, and packs the pieces into as few windows as it can.

Packing is best-fit decreasing bin packing: the longest piece first, each into the fullest window that still has room
for it (Johnson 1973, "Near-optimal bin packing algorithms"; for language models Ding et al. 2024, "Fewer Truncations
Improve Language Modeling", arXiv:2404.10830). It needs at most 11/9 of the fewest possible windows, plus one; on the
lengths of real text it leaves well under a percent empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from dlo_framework.errors import DloError

LongSamples = Literal["truncate", "split", "drop", "error"]

#: How many pieces' targets are counted at once.
_AT_ONCE = 1 << 16


class Pieces(NamedTuple):
    """Runs of positions, each within one document.

    A position is a token that another one follows in its document: a document of n tokens has n - 1 of them.

    Attributes:
        start: int64 [P], the place of each piece's first token among all tokens.
        length: int64 [P], how many positions it has; what its last one predicts lies at ``start + length``.
        document: int64 [P], the document that it is of.
        too_long: how many documents were longer than the window.
        too_short: how many had no position at all; they have no piece.
    """

    start: np.ndarray
    length: np.ndarray
    document: np.ndarray
    too_long: int
    too_short: int

    def only(self, keep: np.ndarray) -> Pieces:
        """Returns the pieces for which ``keep``, bool [P], is true."""
        return self._replace(start=self.start[keep], length=self.length[keep], document=self.document[keep])


class Packing(NamedTuple):
    """Where each piece lies.

    Attributes:
        window: int64 [P], the window that each piece is in.
        offset: int64 [P], the place of its first position there.
        windows: how many there are.
    """

    window: np.ndarray
    offset: np.ndarray
    windows: int


def cut(bounds: np.ndarray, documents: np.ndarray, seq_len: int, long_samples: LongSamples) -> Pieces:
    """Returns the pieces of some documents, none longer than the window.

    Args:
        bounds: int64 [N + 1]; document i is the tokens from ``bounds[i]`` to before ``bounds[i + 1]``.
        documents: int64 [D], which of them.
        seq_len: positions of a window.
        long_samples: what becomes of a document of more positions: ``truncate`` keeps its start, ``split`` makes
            pieces of ``seq_len`` and a rest, so that each position is still in one of them, ``drop`` leaves it out.

    Raises:
        DloError: on a document that is longer, under ``error``; it names the document by its number.
    """
    start = bounds[documents].astype(np.int64)
    length = bounds[documents + 1].astype(np.int64) - start - 1
    long = length > seq_len
    too_long, too_short = int(long.sum()), int((length < 1).sum())
    if long_samples == "error" and too_long:
        number = int(documents[np.argmax(long)])
        raise TooLong(number, int(length[np.argmax(long)]) + 1, seq_len, too_long)
    keep = length >= 1
    if long_samples == "drop":
        keep &= ~long
    start, length, document = start[keep], length[keep], documents[keep].astype(np.int64)
    if long_samples == "truncate":
        length = np.minimum(length, seq_len)
    elif long_samples == "split":
        parts = -(-length // seq_len)
        skipped = seq_len * _ranges(parts)  # positions of the document before each piece
        start = np.repeat(start, parts) + skipped
        length = np.minimum(np.repeat(length, parts) - skipped, seq_len)
        document = np.repeat(document, parts)
    return Pieces(start, length, document, too_long, too_short)


class TooLong(DloError):
    """A document has more tokens than a window holds, and the policy is ``error``."""

    def __init__(self, document: int, tokens: int, seq_len: int, count: int, place: str | None = None) -> None:
        self.document, self.tokens, self.seq_len, self.count = document, tokens, seq_len, count
        super().__init__(
            f"{place or f'document {document}'}: {tokens} tokens do not fit seq_len {seq_len}, which takes"
            f" {seq_len + 1} ({count} documents are longer); set seq_len to {tokens - 1} or more, or long_samples to"
            " truncate, split or drop"
        )

    def at(self, place: str) -> TooLong:
        """Returns the same error, with the file and line of the document."""
        return TooLong(self.document, self.tokens, self.seq_len, self.count, place)


def count_targets(learned: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Returns how many of each piece's targets are learned, int64 [P].

    Args:
        learned: bool [T], of all tokens.
        pieces: in ascending order of ``start``, none overlapping another's positions.
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


def best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Packs by best fit, decreasing; equal lengths in their order, so that the result is a function of the input.

    Windows with the same room left are handled together: a length goes into all of them at once, as often as it fits.
    So a million documents take a second, whatever the capacity.

    Args:
        lengths: integers [P], each from 1 to ``capacity``.
        capacity: positions of a window.

    Raises:
        DloError: for lengths out of range.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size and (lengths.min() < 1 or lengths.max() > capacity):
        raise DloError(f"lengths must be in 1..{capacity}, got {lengths.min()}..{lengths.max()}")
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    window, offset = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    edges = [*np.flatnonzero(np.diff(sorted_lengths, prepend=capacity + 1)).tolist(), len(lengths)]  # of equal lengths
    room: dict[int, list[np.ndarray]] = {}  # room left -> the windows that have it
    levels: list[int] = []  # the keys of `room`, sorted
    windows = 0
    for first, past in pairwise(edges):
        length = int(sorted_lengths[first])
        while first < past:
            at = bisect_left(levels, length)
            if at < len(levels):
                level = levels[at]
                each = level // length  # the least room that is enough: what is left of it is then the least
                some, rest = _take(room[level], -(-(past - first) // each))
                if rest:
                    room[level] = rest
                else:
                    del room[level], levels[at]
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
            _put(room, levels, level - each * length, some[:whole])
            _put(room, levels, level - (placed - whole * each) * length, some[whole:])
    return Packing(window, offset, windows)


def _take(chunks: list[np.ndarray], count: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the first ``count`` windows of a list of arrays, fewer if there are not as many, and the rest."""
    taken: list[np.ndarray] = []
    for number, chunk in enumerate(chunks):
        if count < len(chunk):
            return np.concatenate([*taken, chunk[:count]]), [chunk[count:], *chunks[number + 1 :]]
        taken.append(chunk)
        count -= len(chunk)
        if not count:
            return np.concatenate(taken), chunks[number + 1 :]
    return np.concatenate(taken), []


def _put(room: dict[int, list[np.ndarray]], levels: list[int], level: int, windows: np.ndarray) -> None:
    if not len(windows) or not level:
        return
    if level not in room:
        room[level] = []
        insort(levels, level)
    room[level].append(windows)


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ..., c - 1 for each of the counts, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
