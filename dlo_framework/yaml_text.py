"""Reader of YAML that refuses what PyYAML accepts in silence: repeated keys, and aliases or nesting without a limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from dlo_framework.errors import DloError

#: Levels of a file; PyYAML recurses several times a level, and Python's limit is 1,000.
MAX_DEPTH = 64
#: Values that the aliases of a file repeat: a few lines can mean billions.
MAX_REPEATED = 10_000


def read_yaml(path: str | Path, what: str = "file") -> Any:
    """Returns the content of a YAML file.

    Args:
        path: File.
        what: Name of its kind in messages, such as `config`.

    Raises:
        DloError: If it cannot be read, or for what :func:`parse_yaml` refuses.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DloError(f"{path}: a {what} must be a text file, got binary data") from error
    except OSError as error:
        raise DloError(f"cannot read the {what} {path}: {error.strerror}") from error
    return parse_yaml(text, str(path), what)


def parse_yaml(text: str, source: str, what: str = "value") -> Any:
    """Returns the content of a YAML text.

    Args:
        text: Text.
        source: Name of the text in messages.
        what: Name of its kind in messages.

    Raises:
        DloError: If it is not YAML (the message has line and column), a key is repeated, or its size has no limit.
    """
    try:
        return load_yaml(text, source)
    except yaml.YAMLError as error:
        raise DloError(f"{source}: a {what} must be valid YAML: {' '.join(str(error).split())}") from error


def load_yaml(text: str, source: str) -> Any:
    """Returns the content of a text.

    Raises:
        yaml.YAMLError: If it is not YAML.
        DloError: If a key is repeated, or its size has no limit.
    """
    loader = _StrictLoader(text, source)
    try:
        return loader.get_single_data()
    except DloError:
        raise
    except (ValueError, AttributeError, OverflowError) as error:  # Of `!!int x`, or of a date that does not exist.
        raise yaml.YAMLError(f"a value does not fit its type: {error}") from error


#: Numbers such as `1e-3`, which YAML 1.2 and jsonargparse read as such, and PyYAML as text.
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that compares keys and counts values while it composes, before anything is built.

    Args:
        text: Text.
        source: Name of the text in messages.
    """

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.name = source
        self._depth = 0
        self._values: dict[yaml.Node, int] = {}  # Those of complete nodes, with what aliases in them repeat.
        self._repeated = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes one node; an alias's has been composed before."""
        mark = self.peek_event().start_mark
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refusal(mark, f"YAML must have at most {MAX_DEPTH} levels, got more; flatten it")
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias:
            if node not in self._values:
                raise self._refusal(mark, "an alias must be outside of its own anchor, got one inside; remove it")
            self._repeated += self._values[node]
            if self._repeated > MAX_REPEATED:
                raise self._refusal(
                    mark, f"aliases must repeat at most {MAX_REPEATED:,} values, got more; write fewer of them"
                )
            return node
        children = [] if isinstance(node, yaml.ScalarNode) else list(node.value)
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            children = [child for pair in children for child in pair]
        self._values[node] = 1 + sum(self._values[child] for child in children)
        return node

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in seen:
                lines = f"lines {seen[key.tag, key.value]} and {line}"
                raise self._refusal(
                    key.start_mark, f"key '{key.value}' must be unique, got it on {lines}; leave one out"
                )
            seen[key.tag, key.value] = line

    def _refusal(self, mark: Any, text: str) -> DloError:
        return DloError(f"{self.name}: line {mark.line + 1}: {text}")


_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
