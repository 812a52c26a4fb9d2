"""Span corruption: pairs of source and target from plain text.

Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer. Raffel et al., 2019, arXiv
1910.10683, section 3.1.4. As in T5's code, random spans of a text are removed; the source has a sentinel token in place
of each, and the target is each sentinel with the tokens of its span. Both end with the end-of-text token. The lengths
depend on the number of tokens alone. Departure: a text is one document or a part of one, not documents joined.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dlo_framework.errors import DloError, check_number

#: Sentinels that a tokenizer without them gets.
SENTINELS = 100
_SENTINEL = re.compile(r"<extra_id_(\d+)>")


class SpanCounts(NamedTuple):
    """Counts of corrupted texts, int64, of any shape.

    Attributes:
        noise: Tokens that are removed.
        spans: Spans of them.
        source: Tokens of the source, without the end-of-text token.
        target: Tokens of the target, without the end-of-text token.
    """

    noise: np.ndarray
    spans: np.ndarray
    source: np.ndarray
    target: np.ndarray


@dataclass(frozen=True)
class SpanCorruption:
    """Options of span corruption.

    Args:
        density: Fraction of the tokens that are removed.
        mean_span: Mean number of tokens of a span.

    Raises:
        DloError: If a value is out of range.
    """

    density: float = 0.15
    mean_span: float = 3.0

    def __post_init__(self) -> None:
        check_number("noise_density", self.density, "above 0 and below 1", "0.15 is T5's")
        check_number("mean_span", self.mean_span, "at least 1", "3 is T5's")

    def count(self, length: np.ndarray) -> SpanCounts:
        """Returns the counts of texts of these numbers of tokens, each at least 2."""
        length = np.asarray(length, dtype=np.int64)
        noise = np.clip(np.rint(length * self.density).astype(np.int64), 1, length - 1)
        spans = np.rint(noise / self.mean_span).astype(np.int64)
        spans = np.clip(spans, 1, np.minimum(noise, length - noise))
        return SpanCounts(noise, spans, length - noise + spans, noise + spans)

    def longest(self, source: int, target: int, sentinels: int) -> int:
        """Returns the largest number of tokens whose source and target fit these lengths, with their ends.

        Raises:
            DloError: If no text fits.
        """
        lengths = np.arange(2, source + target)
        counts = self.count(lengths)
        fits = (counts.source < source) & (counts.target < target) & (counts.spans <= sentinels)
        if not fits.any():
            raise DloError(
                f"seq_len and target_len must be at least 3, for a text of two tokens, got {source} and {target}"
            )
        return int(lengths[fits].max())

    def corrupt(
        self, tokens: np.ndarray, sentinels: np.ndarray, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source and the target of a text, int64, without end-of-text tokens.

        Args:
            tokens: Ids of the text's tokens, int64 [n], n at least 2.
            sentinels: Ids of the sentinels in their order, int64, one for each span at least.
            random: Generator of the spans.
        """
        counts = self.count(np.array(len(tokens)))
        spans, noise = int(counts.spans), int(counts.noise)
        lengths = np.empty(2 * spans, dtype=np.int64)  # A kept run, a removed one, and so on.
        lengths[0::2] = _divide(len(tokens) - noise, spans, random)
        lengths[1::2] = _divide(noise, spans, random)
        ends = np.cumsum(lengths)
        kept = np.repeat(np.arange(2 * spans) % 2 == 0, lengths)
        marks = sentinels[:spans]
        before = np.cumsum(lengths[0::2])  # kept tokens before each removed span
        removed = np.cumsum(lengths[1::2]) - lengths[1::2]  # removed tokens before each of them
        assert ends[-1] == len(tokens)
        return np.insert(tokens[kept], before, marks), np.insert(tokens[~kept], removed, marks)


def _divide(items: int, parts: int, random: np.random.Generator) -> np.ndarray:
    """Returns the lengths of `parts` runs of at least one item, int64; each division is equally probable."""
    cuts = np.sort(random.choice(items - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [items]]))


def find_sentinels(tokenizer: Any) -> np.ndarray:
    """Returns the ids of a tokenizer's tokens `<extra_id_0>`, `<extra_id_1>` and so on, int64; they may be none."""
    sentinels = [
        (int(match[1]), id_) for token, id_ in tokenizer.get_vocab().items() if (match := _SENTINEL.fullmatch(token))
    ]
    return np.array([id_ for _, id_ in sorted(sentinels)], dtype=np.int64)


def add_sentinels(tokenizer: Any) -> Any:
    """Returns a tokenizer with sentinels: a tokenizer without any gets a hundred as its last ids."""
    if not len(find_sentinels(tokenizer)):
        names = [f"<extra_id_{number}>" for number in range(SENTINELS)]
        tokenizer.add_tokens(names, special_tokens=True)
    return tokenizer
