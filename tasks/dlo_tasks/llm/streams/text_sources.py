"""The options ``sources`` and ``mix`` of text data: named sources, each text or tokenised shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dlo_framework.errors import DloError, did_you_mean
from dlo_tasks.llm.streams.token_sources import FORMATS, TokenFiles

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
