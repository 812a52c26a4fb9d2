"""Reader of DeepSpeed configurations (JSON or Hjson, as in DeepSpeed), and access to them by nested paths.

Errors name the place in the file. A path is written as ``zero_optimization.stage``.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError, did_you_mean

#: Placeholders of templates: of shells, of Jinja, and in angle brackets.
_PLACEHOLDER = re.compile(r"\$\{?\w+\}?|\{\{.*?\}\}|^<[^<>]+>$")

#: Name in messages of a configuration that is given as a mapping.
INLINE = "strategy.config"

#: Name in messages of the strategy's typed options without a configuration.
OPTIONS_ALONE = "trainer.strategy"


class DeepSpeedJson(dict[str, Any]):
    """A DeepSpeed configuration with the name that messages use for it.

    Attributes:
        source: Path of the file it was read from, or ``strategy.config``.
    """

    def __init__(self, content: Mapping[str, Any], source: str = INLINE) -> None:
        super().__init__(content)
        self.source = source

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepSpeedJson:
        return DeepSpeedJson(copy.deepcopy(dict(self), memo), self.source)


def get_source(config: Mapping[str, Any]) -> str:
    """Returns the name that messages use for a configuration."""
    return getattr(config, "source", INLINE)


def read_json(config: str | Path | Mapping[str, Any] | None) -> tuple[dict[str, Any], str]:
    """Returns a configuration and its name in messages: its file's path, :data:`INLINE`, or :data:`OPTIONS_ALONE`.

    Args:
        config: Path of a file, a mapping, or None for an empty one. Files are JSON, or Hjson (comments, trailing
            commas), as DeepSpeed reads them.

    Raises:
        DloError: If the file does not exist, does not parse (the message has line and column), repeats a key, or is not
            a mapping.
    """
    if config is None:
        return {}, OPTIONS_ALONE
    if isinstance(config, Mapping):
        try:
            inline = json.loads(json.dumps(config))
        except TypeError as error:
            raise DloError(
                f"{INLINE}: a DeepSpeed config must have only numbers, strings, booleans, lists and mappings: {error}"
            ) from error
        _check_filled(inline, INLINE)
        return inline, INLINE
    path = Path(config)
    source = str(config)
    if not path.is_file():
        raise DloError(f"DeepSpeed config {source}: the file does not exist{_suggest_file(path)}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DloError(f"{source}: a DeepSpeed config must be a text file, got binary data") from error
    if not text.strip():
        raise DloError(f'{source}: the file is empty; start from {{"zero_optimization": {{"stage": 2}}}}')
    content = parse_json(text, source)
    if not isinstance(content, dict):
        raise DloError(
            f'{source}: a DeepSpeed config must be a mapping, such as {{"zero_optimization": {{"stage": 2}}}}, got a'
            f" {type(content).__name__}"
        )
    _check_filled(content, source)
    return content, source


def _check_filled(content: Any, source: str, path: str = "") -> None:
    """Checks that no value is a template's placeholder, such as `${zero_stage},`, which Hjson reads as text.

    Raises:
        DloError: For the first placeholder, with its key.
    """
    if isinstance(content, Mapping | list):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            _check_filled(key, source, path)
            _check_filled(value, source, f"{path}.{key}".lstrip("."))
    elif isinstance(content, str) and (_PLACEHOLDER.search(content) or content.endswith(",")):
        why = "a placeholder" if _PLACEHOLDER.search(content) else "a text without quotes, and its comma"
        raise DloError(
            f"{source}: {path or 'a key'} must be a value, got {content!r}, {why}; write the value, such as 2 or true"
        )


def _suggest_file(path: Path) -> str:
    """Returns the end of a message: the file of the same folder with the nearest name."""
    if not path.parent.is_dir():
        return f"; neither is its folder {path.parent}"
    found = [file.name for file in path.parent.iterdir() if file.suffix in (".json", ".hjson")]
    return did_you_mean(path.name, found) or f" in {path.parent.resolve()}"


def parse_json(text: str, source: str) -> Any:
    """Returns the content of a text in JSON or Hjson.

    Args:
        text: Text to parse.
        source: Name of the configuration in messages.

    Raises:
        DloError: If it is neither (the message has line and column of the JSON error), or repeats a key.
    """
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _without_repetition(pairs, source))
    except json.JSONDecodeError as error:
        found = _parse_hjson(text, source)
        if found is not None:
            return found
        line = [*text.splitlines(), ""][error.lineno - 1]
        shown = f" at {line.strip()[:60]!r}" if line.strip() else ""
        raise DloError(f"{source}: line {error.lineno}, column {error.colno}: {error.msg}{shown}") from error


def _parse_hjson(text: str, source: str) -> Any:
    """Returns the content of a text in Hjson, or None. DeepSpeed reads its files with that library."""
    if importlib.util.find_spec("hjson") is None:
        return None  # It comes with DeepSpeed; another message reports that it is missing.
    hjson: Any = importlib.import_module("hjson")
    try:
        return json.loads(
            json.dumps(hjson.loads(text, object_pairs_hook=lambda pairs: _without_repetition(pairs, source)))
        )
    except hjson.HjsonDecodeError:
        return None


def _without_repetition(pairs: list[tuple[str, Any]], source: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise DloError(f"{source}: key '{key}' must be unique, got {result[key]!r} and {value!r}; leave one out")
        result[key] = value
    return result


# --- paths -------------------------------------------------------------------------------------------------


def drop_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration, or a section of one, without the values ``"auto"`` at any level."""
    return {
        key: drop_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for key, value in config.items()
        if not (isinstance(value, str) and value == "auto")
    }


def get(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Returns the value at a path such as ``zero_optimization.stage``."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def number(config: Mapping[str, Any], path: str, default: int) -> int:
    """Returns the integer at a path; the default if there is none, or it is ``"auto"``."""
    value = get(config, path)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def get_stage(config: Mapping[str, Any]) -> int:
    """Returns the ZeRO stage; 0, DeepSpeed's default, if there is none."""
    return number(config, "zero_optimization.stage", 0)


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Sets the value at a path, and creates the sections above it."""
    *parents, last = path.split(".")
    for parent in parents:
        if config.get(parent) is None:
            config[parent] = {}
        config = config[parent]
    config[last] = value
