"""YAML that switches a plug-in on, made from its constructor's source."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

import yaml

from dlo_framework.registry import Registry
from dlo_framework.registry.class_source import Parameter, SourceNotFoundError, read_class

#: Place of a plug-in of a kind in a config, one key per level; ``-`` is an item of a list.
_PLACES = {
    "strategy": ("trainer:", "strategy:"),
    "callback": ("trainer:", "callbacks:", "-"),
    "task": ("model:",),
    "data": ("data:",),
    "applier": ("trainer:", "strategy:", "class_path: {strategy}", "init_args:", "appliers:", "-"),
}


def format_yaml_snippet(kind: str, name: str, parameters: Sequence[Parameter]) -> str:
    """Returns YAML to paste into a config.

    Each parameter has its default as its value. A required one has its type in angle brackets, to be
    replaced; one whose default YAML cannot express is a comment.

    Args:
        kind: Kind of plug-in, one of :data:`dlo_framework.registry.KINDS`.
        name: Short name of the plug-in.
        parameters: Parameters of its constructor.
    """
    lines: list[str] = []
    indent = ""
    for key in _PLACES[kind]:
        if key == "-":
            break
        lines.append(indent + key.format(strategy=find_applying_strategy()))
        indent += "" if key.startswith("class_path") else "  "
    item = _PLACES[kind][-1] == "-"
    lines.append(f"{indent}{'- ' if item else ''}class_path: {name}")
    indent += "  " if item else ""
    arguments = [_format_argument(parameter) for parameter in parameters]
    if arguments:
        # A mapping with only comments in it would be null.
        said = any(not line.startswith("#") for line in arguments)
        lines.append(f"{indent}{'' if said else '# '}init_args:")
        lines += [f"{indent}  {line}" for line in arguments]
    return "\n".join(lines)


def find_applying_strategy() -> str:
    """Returns the first installed strategy that takes appliers; a placeholder if there is none."""
    for plugin in Registry().plugins("strategy"):
        with contextlib.suppress(SourceNotFoundError):
            if any(parameter.name == "appliers" for parameter in read_class(plugin.target).parameters):
                return plugin.name
    return "<a strategy with appliers>"


def _format_argument(parameter: Parameter) -> str:
    if parameter.default is None:
        return f"{parameter.name}: <{parameter.type or 'value'}>  # required"
    try:
        return f"{parameter.name}: {format_yaml_value(ast.literal_eval(parameter.default))}"
    except (ValueError, SyntaxError, yaml.YAMLError):
        return f"# {parameter.name}: {parameter.default}"


class _LiteralDumper(yaml.SafeDumper):
    """SafeDumper that refuses sets and bytes, which need tags in YAML."""

    yaml_representers: ClassVar = {
        kind: function for kind, function in yaml.SafeDumper.yaml_representers.items() if kind not in (set, bytes)
    }


def format_yaml_value(value: Any) -> str:
    """Returns a Python literal as YAML on one line.

    Raises:
        yaml.YAMLError: If plain YAML has no such value, such as a set or bytes.
    """
    text: str = yaml.dump(
        value,
        Dumper=_LiteralDumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=float("inf"),
    )
    return text.removesuffix("...\n").rstrip("\n")
