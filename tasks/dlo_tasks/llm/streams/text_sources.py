"""The options ``sources`` and ``mix`` of text data: named sources, each text or tokenised shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from dlo_framework.data import BufferShuffle, GlobalShuffle, Mixture, MixtureOrder, SampleOrder, hash64
from dlo_framework.data.mixture import Ramp, read_points
from dlo_framework.errors import DloError, did_you_mean
from dlo_tasks.llm.streams.token_sources import FORMATS, TokenFiles

ShuffleName = Literal["global", "buffer"]
_TEXT = ("files",)
_TOKENS = ("path", "format", "column", "dtype")
_DTYPES = ("uint8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


class TextSource(NamedTuple):
    """One source of text.

    Attributes:
        name: Name of the source.
        files: Paths or globs of text that is tokenised; None for tokenised shards.
        tokens: Tokenised shards; None for text.
    """

    name: str
    files: str | list[str] | None
    tokens: TokenFiles | None


class MixOptions(NamedTuple):
    """How sources are mixed and shuffled.

    Attributes:
        mix: Value of the option; see :func:`dlo_framework.data.mixture.read_points`.
        ramp: Change of the weights between two moments.
        shuffle: Shuffle inside a source: ``global`` or ``buffer``.
        chunk: Number of windows that stay together, under ``buffer``.
        buffer: Number of windows that are shuffled together, under ``buffer``.
        epoch_samples: Number of samples per epoch; None for those of all sources.
    """

    mix: Any
    ramp: Ramp
    shuffle: ShuffleName
    chunk: int
    buffer: int
    epoch_samples: int | None

    def order(self, names: Sequence[str], sizes: Sequence[int], seed: int) -> MixtureOrder:
        """Returns the order of the samples of all sources.

        Args:
            names: Names of the sources.
            sizes: Number of samples of each source.
            seed: Seed of the run's order.
        """
        mixture = Mixture(names, read_points(self.mix, names, sizes), self.ramp)
        seeds = (hash64(np.arange(len(names)), seed) >> np.uint64(1)).tolist()
        orders = [self._order_of(size, own) for size, own in zip(sizes, seeds, strict=True)]
        return MixtureOrder(mixture, orders, self.epoch_samples)

    def _order_of(self, size: int, seed: int) -> SampleOrder:
        if self.shuffle == "global":
            return GlobalShuffle(size, seed)
        return BufferShuffle(size, seed, chunk=self.chunk, buffer=self.buffer)

    def check(self, names: Sequence[str]) -> None:
        """Checks the options before files are opened.

        Raises:
            DloError: If weights are invalid, or a size is out of range.
        """
        if self.epoch_samples is not None and self.epoch_samples < 1:
            raise DloError(f"epoch_samples must be at least 1, got {self.epoch_samples}; leave it out for all samples")
        self.order(names, [1] * len(names), 0)


def read_sources(option: Mapping[str, Any]) -> list[TextSource]:
    """Returns the sources that the option ``sources`` describes.

    Args:
        option: Options of each source, by name: ``files``; or ``path`` with ``format``, ``column`` and ``dtype``.

    Raises:
        DloError: If there is none, or a source has unknown, missing or contradictory keys.
    """
    if not option:
        raise DloError("sources must name at least one source, got none; write {web: {files: web/*.jsonl}}")
    return [_read_source(name, values) for name, values in option.items()]


def _read_source(name: str, values: Any) -> TextSource:
    key = f"sources.{name}"
    if not isinstance(values, Mapping):
        raise DloError(f"{key} must be an object with files or path, got {str(values)[:60]!r}; write {{files: ...}}")
    known = (*_TEXT, *_TOKENS)
    unknown = next((entry for entry in values if entry not in known), None)
    if unknown is not None:
        raise DloError(
            f"{key} must have only {', '.join(known)}, got {unknown!r}{did_you_mean(unknown, known) or '; remove it'}"
        )
    if ("files" in values) == ("path" in values):
        got = "both" if "files" in values else "neither"
        raise DloError(f"{key} must have either files, for text, or path, for tokenised shards, got {got}")
    if "files" in values:
        extra = next((entry for entry in values if entry != "files"), None)
        if extra is not None:
            raise DloError(f"{key}.{extra} must not be set for text, got {values[extra]!r}; remove it, or set path")
        return TextSource(name, values["files"], None)
    if values.get("format") not in (None, *FORMATS):
        raise DloError(
            f"{key}.format must be one of {', '.join(FORMATS)}, got {values['format']!r}"
            f"{did_you_mean(str(values['format']), FORMATS)}"
        )
    if values.get("dtype") not in (None, *_DTYPES):
        raise DloError(f"{key}.dtype must be one of {', '.join(_DTYPES)}, got {values['dtype']!r}")
    tokens = TokenFiles(name, str(values["path"]), values.get("format"), values.get("column"), values.get("dtype"))
    return TextSource(name, None, tokens)
