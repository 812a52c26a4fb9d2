"""Configs as nested mappings: merged like on the command line, and set by dotted keys."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from dlo_framework.errors import DloError, did_you_mean


def merge_configs(configs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns several configs as one, the later over the earlier, as ``dlo fit`` reads several ``--config``.

    Mappings are merged key by key, but one with another ``class_path`` replaces the earlier one. Lists are replaced;
    those of a key that ends with ``+`` are appended.
    """
    merged: dict[str, Any] = {}
    for config in configs:
        merged = _merge(merged, config)
    return merged


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(base)
    for key, value in over.items():
        name = key.removesuffix("+") if isinstance(key, str) else key
        known = found.get(name)
        if name != key:
            found[name] = [*(known or []), *(value if isinstance(value, list) else [value])]
        elif isinstance(known, dict) and isinstance(value, dict) and not _is_other_class(known, value):
            found[name] = _merge(known, value)
        else:
            found[name] = copy.deepcopy(value)
    return found


def _is_other_class(known: dict[str, Any], value: dict[str, Any]) -> bool:
    return "class_path" in value and value["class_path"] != known.get("class_path")


def apply_values(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a config with these values of dotted keys.

    Raises:
        DloError: A key does not lead to a place in the config.
    """
    found = copy.deepcopy(config)
    for key, value in values.items():
        set_key(found, key, copy.deepcopy(value))
    return found


def set_key(config: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key of a config in place, and creates the mappings on its way.

    A part of the key selects an item of a list by its index, or by its class: ``trainer.callbacks.OneCycle.init_args``.

    Raises:
        DloError: The key leads through a value that is not a mapping, or to no item of a list.
    """
    parts = key.split(".")
    place: Any = config
    for number, part in enumerate(parts[:-1]):
        shown = ".".join(parts[: number + 1])
        if isinstance(place, list):
            place = place[_index(place, part, key)]
        elif place.get(part) is None:
            place[part] = {}
            place = place[part]
        else:
            place = place[part]
        if not isinstance(place, dict | list):
            raise DloError(
                f"space: {key} must lead through mappings, got {shown}: {place}; write {shown} as a class_path with"
                " init_args in the config, or leave the key out"
            )
    if isinstance(place, list):
        place[_index(place, parts[-1], key)] = value
    else:
        place[parts[-1]] = value


def _index(items: list[Any], part: str, key: str) -> int:
    """Returns the index of a list's item, by its number or by the name of its class."""
    if part.isdigit() and int(part) < len(items):
        return int(part)
    names = [str(item.get("class_path", "")).rpartition(".")[2] if isinstance(item, dict) else "" for item in items]
    if names.count(part) != 1:
        problem = f"got {names.count(part)} of '{part}'" if part in names else f"got '{part}'"
        raise DloError(
            f"space: {key} must select one item of the config's list, by its index below {len(items)} or its class,"
            f" {problem}{did_you_mean(part, [name for name in names if name]) or ';'} the config has:"
            f" {', '.join(name for name in names if name) or 'no class'}"
        )
    return names.index(part)
