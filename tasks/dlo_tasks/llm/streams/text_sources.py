"""Options ``sources`` and ``mix`` of text data: named sources of text or tokenised shards, validation windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from dlo_framework.errors import DloError, did_you_mean
from dlo_tasks.llm.streams.token_sources import FORMATS, TokenFiles
from dlo_tasks.llm.streams.token_windows import TokenWindows

_TEXT = ("files",)
_TOKENS = ("path", "format", "column")


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


def read_sources(option: Mapping[str, Any]) -> list[TextSource]:
    """Returns the sources that the option ``sources`` describes.

    Args:
        option: Options of each source, by name: ``files``; or ``path`` with ``format`` and ``column``.

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
    return TextSource(name, None, TokenFiles(name, str(values["path"]), values.get("format"), values.get("column")))


class SourceStatistics(NamedTuple):
    """Statistics of the windows of all sources.

    Attributes:
        sizes: Number of windows of each source.
        seq_len: Positions per window.
    """

    sizes: dict[str, int]
    seq_len: int

    @property
    def samples(self) -> int:
        """Number of windows of all sources."""
        return sum(self.sizes.values())

    def __str__(self) -> str:
        each = ", ".join(f"{name} {size:,}" for name, size in self.sizes.items())
        return f"{self.samples:,} windows of {self.seq_len:,} in {len(self.sizes)} sources: {each}"


def hold_out(windows: TokenWindows, val_fraction: float) -> tuple[TokenWindows, TokenWindows]:
    """Returns the windows for training and those for validation: the last of the source, rounded up.

    Contiguous windows share no document with those for training but one. Nothing is read.

    Args:
        windows: All windows of a source.
        val_fraction: Fraction of them to hold out; with 0, both parts are all windows.

    Raises:
        DloError: If no window is left for training.
    """
    if not val_fraction:
        return windows, windows
    held = math.ceil(len(windows) * val_fraction)
    if held >= len(windows):
        raise DloError(
            f"val_fraction must leave windows of sources.{windows.name} for training, got {val_fraction} of"
            f" {len(windows)}; lower it, or set val_files"
        )
    past = len(windows)
    return windows.part(0, past - held), windows.part(past - held, past)
