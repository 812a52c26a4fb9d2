"""Access to nested mappings by paths such as ``zero_optimization.stage``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


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
        config = config.setdefault(parent, {})
    config[last] = value
