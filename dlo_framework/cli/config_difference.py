"""Difference of two configs by dotted key; short names and class paths, and unset keys and defaults, are equal."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

from dlo_framework.registry import Registry
from dlo_framework.registry.class_source import SourceNotFoundError, read_class

#: Where a config has no value.
ABSENT = object()
_TRAINER = "lightning.pytorch.trainer.trainer:Trainer"
#: Module of short names of other classes than plug-ins, such as Lightning's EarlyStopping, whose defaults are unknown.
_UNKNOWN = "unknown"
#: Keys of dlo itself with their defaults.
_OWN_DEFAULTS: dict[str, Any] = {
    "seed_everything": 42,
    "run.dir": None,
    "run.async_checkpoints": False,
    "run.checkpoint_format": "canonical",
    "run.predictions": "pt",
    "run.stop_grace": 60.0,
    "plugins": None,
    "data": None,
    "optimizer": None,
    "lr_scheduler": None,
    "weights_only": None,
    "ckpt_path": None,
}


class Difference(NamedTuple):
    """One key that two configs do not share.

    Attributes:
        key: Dotted key; a class in a list is named by its short name: `trainer.callbacks[OneCycle].max_lr`.
        first: Value in the first config; `ABSENT` where it has none.
        second: Value in the second config; `ABSENT` where it has none.
    """

    key: str
    first: Any
    second: Any


def compare_configs(first: Mapping[str, Any], second: Mapping[str, Any], registry: Registry) -> list[Difference]:
    """Returns the keys whose values differ, in the order of the first config, then of the second.

    Args:
        first: Config.
        second: Config to compare it with.
        registry: Registry of the plug-ins, for short names and defaults.
    """
    flat = [_Flattener(registry).flatten(config) for config in (first, second)]
    keys = dict.fromkeys([*flat[0], *flat[1]])
    pairs = (Difference(key, flat[0].get(key, ABSENT), flat[1].get(key, ABSENT)) for key in keys)
    return [each for each in pairs if each.first is ABSENT or each.second is ABSENT or each.first != each.second]


class _Flattener:
    """Flattens configs to dotted keys without defaults."""

    def __init__(self, registry: Registry) -> None:
        self._targets = {plugin.name: plugin.target for plugin in registry.plugins()}
        self._names = {plugin.class_path: plugin.name for plugin in registry.plugins()}

    def flatten(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a config by dotted key, without those that equal defaults."""
        defaults = {f"trainer.{key}": value for key, value in _defaults_of(_TRAINER).items()} | _OWN_DEFAULTS
        flat: dict[str, Any] = {}
        for name, value in config.items():
            if isinstance(value, Mapping) and "class_path" not in value:
                for key, inner in value.items():
                    self._add(flat, f"{name}.{key}", inner)
            else:
                self._add(flat, str(name), value)
        return {key: value for key, value in flat.items() if key not in defaults or not _same(defaults[key], value)}

    def _add(self, flat: dict[str, Any], key: str, value: Any) -> None:
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            path: str = value["class_path"]
            name = self._names.get(path, path)
            flat[key] = name
            defaults = _defaults_of(self._targets.get(name) or _as_target(name))
            for option, inner in {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}.items():
                if option not in defaults or not _same(defaults[option], inner):
                    self._add(flat, f"{key}.{option}", inner)
        elif isinstance(value, list) and any(isinstance(item, Mapping) and "class_path" in item for item in value):
            self._add_list(flat, key, value)
        else:
            flat[key] = value

    def _add_list(self, flat: dict[str, Any], key: str, items: list[Any]) -> None:
        seen: dict[str, int] = {}
        for item in items:
            path = item.get("class_path") if isinstance(item, Mapping) else item
            name = self._names.get(str(path), str(path)).rpartition(".")[2]
            seen[name] = seen.get(name, 0) + 1
            number = f" {seen[name]}" if seen[name] > 1 else ""
            self._add(flat, f"{key}[{name}{number}]", item)


def _as_target(class_path: str) -> str:
    module, _, name = class_path.rpartition(".")
    return f"{module or _UNKNOWN}:{name}"


def _defaults_of(target: str) -> dict[str, Any]:
    """Returns the literal defaults of a class's constructor; none for a class without a source."""
    try:
        parameters = read_class(target).parameters
    except SourceNotFoundError:
        return {}
    found: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.default is not None:
            try:
                found[parameter.name] = ast.literal_eval(parameter.default)
            except (ValueError, SyntaxError):
                continue
    return found


def _same(default: Any, value: Any) -> bool:
    as_list = list(default) if isinstance(default, tuple) else default
    return bool(as_list == value) and isinstance(as_list, bool) == isinstance(value, bool)
