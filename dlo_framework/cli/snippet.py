"""YAML that switches a plug-in on, made from its constructor's source."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from dlo_framework.registry.class_source import Parameter

#: Place of a plug-in of a kind in a config, one key per level; ``-`` is an item of a list.
_PLACES = {
    "strategy": ("trainer:", "strategy:"),
    "callback": ("trainer:", "callbacks:", "-"),
    "task": ("model:",),
    "data": ("data:",),
    "applier": ("-",),
}

#: Words that YAML does not read as text.
_NOT_TEXT = {"", "~", "null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def format_yaml_snippet(kind: str, name: str, parameters: Sequence[Parameter]) -> str:
    """Returns YAML to paste into a config.

    Each parameter has its default as its value. A required one has its type in angle brackets, to be
    replaced; one whose default YAML cannot express is a comment.

    Args:
        kind: Kind of plug-in, one of :data:`dlo_framework.registry.KINDS`.
        name: Short name of the plug-in.
        parameters: Parameters of its constructor.
    """
    lines = ["# an item of a strategy's list of appliers"] if kind == "applier" else []
    indent = ""
    for key in _PLACES[kind]:
        if key == "-":
            break
        lines.append(indent + key)
        indent += "  "
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


def _format_argument(parameter: Parameter) -> str:
    if parameter.default is None:
        return f"{parameter.name}: <{parameter.type or 'value'}>  # required"
    try:
        return f"{parameter.name}: {format_yaml_value(ast.literal_eval(parameter.default))}"
    except (ValueError, TypeError, SyntaxError):
        return f"# {parameter.name}: {parameter.default}"


def format_yaml_value(value: Any) -> str:
    """Returns a Python literal as YAML on one line.

    Raises:
        TypeError: If YAML has no such value, such as a set or bytes.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        # YAML 1.1 takes 1e-05 for text: a float needs a point.
        text = repr(value).replace("inf", ".inf").replace("nan", ".nan")
        return text if "." in text else re.sub("e", ".0e", text)
    if isinstance(value, str):
        bare = re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in _NOT_TEXT
        return value if bare else json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_yaml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{format_yaml_value(k)}: {format_yaml_value(v)}' for k, v in value.items())}}}"
    raise TypeError(f"YAML has no {type(value).__name__}")
