"""``dlo config``: compares two configs; installed packages add further commands to it."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlo_framework.cli.command_table import SECTIONS, installed_commands, load_command
from dlo_framework.cli.commands.plugins_command import format_yaml_value
from dlo_framework.cli.config_scan import CommandParser, collect_strings, read_config, resolve_config
from dlo_framework.registry import Registry
from dlo_framework.registry.class_source import ClassSource, SourceNotFoundError, read_class
from dlo_framework.registry.registry import own_packages

DESCRIPTION = """Print the keys in which two configs differ; exit code 1 if there are any.

A short name equals its class path, and a key with its default value equals an unset one, so that a config can be
compared with the config.yaml of a run:

  dlo config diff quickstart runs/quickstart/version_0/config.yaml"""


def main(argv: list[str]) -> int:
    """Prints the difference of two configs, and returns 1 if there is one; or runs an installed command."""
    installed = [name.split()[1] for name in installed_commands() if name.startswith("config ")]
    if argv and argv[0] in installed:
        return load_command(f"config {argv[0]}")(argv[1:]) or 0
    more = f" Further commands: {', '.join(installed)}." if installed else ""
    parser = CommandParser("dlo config", description=f"Compare two configs.{more}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", required=True)
    diff = commands.add_parser("diff", help="print the keys in which two configs differ", description=DESCRIPTION)
    diff.add_argument("first", metavar="A", help="a path, or a name that `dlo configs` lists")
    diff.add_argument("second", metavar="B", help="the same")
    given = parser.parse_args(argv or ["--help"])
    first, second = (read_config(resolve_config(name)) for name in (given.first, given.second))
    names = [(config.get("run") or {}).get("name") for config in (first, second)]
    for name, config, other in zip((given.first, given.second), (first, second), reversed(names), strict=True):
        if other == Path(name).stem:  # The default, which only a run's own config writes down.
            config.setdefault("run", {}).setdefault("name", other)
    differences = compare_configs(first, second, Registry())
    for key, one, other in differences:
        if other is ABSENT:
            print(f"- {key}: {_show(one)}")
        elif one is ABSENT:
            print(f"+ {key}: {_show(other)}")
        else:
            print(f"  {key}: {_show(one)} -> {_show(other)}")
    return 1 if differences else 0


def _show(value: Any) -> str:
    return format_yaml_value(value)


#: Where a config has no value.
ABSENT = object()
_LISTS = ("trainer.callbacks", "trainer.logger", "trainer.plugins")
#: Other keys with their defaults.
_OWN_DEFAULTS: dict[str, Any] = {
    "seed_everything": 42,
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
    flattener = _Flattener(registry, collect_strings([first, second]))
    flat = [flattener.flatten(config) for config in (first, second)]
    keys = dict.fromkeys([*flat[0], *flat[1]])
    pairs = (Difference(key, flat[0].get(key, ABSENT), flat[1].get(key, ABSENT)) for key in keys)
    return [each for each in pairs if each.first is ABSENT or each.second is ABSENT or each.first != each.second]


class _Flattener:
    """Flattens configs to dotted keys without defaults."""

    def __init__(self, registry: Registry, strings: Iterable[str]) -> None:
        self._targets = {plugin.name: plugin.target for plugin in registry.plugins()}
        for text in strings:  # Class paths of other classes, which a config may name by their last part too.
            home, _, last = text.rpartition(".")
            if home.partition(".")[0] in ("lightning", *own_packages()):
                self._targets.setdefault(last, f"{home}:{last}")

    def flatten(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a config by dotted key, without those that equal defaults."""
        defaults = dict(_OWN_DEFAULTS)
        for section, target in SECTIONS.items():
            defaults |= {f"{section}.{key}": value for key, value in _defaults_of(_read(target)).items()}
        flat: dict[str, Any] = {}
        for name, value in config.items():
            if isinstance(value, Mapping) and "class_path" not in value:
                for key, inner in value.items():
                    self._add(flat, f"{name}.{key}", inner)
            else:
                self._add(flat, str(name), value)
        return {key: value for key, value in flat.items() if key not in defaults or not _same(defaults[key], value)}

    def _short(self, path: str) -> str:
        """Returns the short name of a class that has one; each plug-in is a name of ``dlo_framework`` too."""
        home, _, last = path.rpartition(".")
        known = self._targets.get(last)
        return last if known and (home == "dlo_framework" or known == f"{home}:{last}") else path

    def _add(self, flat: dict[str, Any], key: str, value: Any, kinds: Sequence[str] = ()) -> None:
        """Adds what a value has; `kinds` are the classes, as ``module:Class``, that its option may take."""
        options: Mapping[str, Any] = {}
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            name = flat[key] = self._short(value["class_path"])
            kinds = [self._targets.get(name) or ":".join(name.rsplit(".", 1))]
            options = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        elif isinstance(value, list) and (key in _LISTS or any(map(_names_class, value))):
            self._add_list(flat, key, [{"class_path": item} if isinstance(item, str) else item for item in value])
        else:
            kinds = [kind for kind in kinds if isinstance(value, Mapping) and _read(kind)]
            flat[key] = kinds[0].partition(":")[2] if kinds else value
            options = value if kinds else {}
        source = next(filter(None, map(_read, kinds)), None) if options else None
        defaults = _defaults_of(source)
        types = {
            each.name: [f"{each.module}:{word}" for word in re.findall(r"\w+", each.type)]
            for each in (source.parameters if source else ())
        }
        for option, inner in options.items():
            if option not in defaults or not _same(defaults[option], inner):
                self._add(flat, f"{key}.{option}", inner, types.get(option, ()))

    def _add_list(self, flat: dict[str, Any], key: str, items: list[Any]) -> None:
        seen: dict[str, int] = {}
        for item in items:
            name = str(item.get("class_path") if isinstance(item, Mapping) else item).rpartition(".")[2]
            seen[name] = seen.get(name, 0) + 1
            number = f" {seen[name]}" if seen[name] > 1 else ""
            self._add(flat, f"{key}[{name}{number}]", item)


def _names_class(item: Any) -> bool:
    return isinstance(item, Mapping) and "class_path" in item


def _read(target: str) -> ClassSource | None:
    """Returns a class with its constructor from its source; None without one."""
    with contextlib.suppress(SourceNotFoundError):
        source = read_class(target)
        return source if source.parameters else None
    return None


def _defaults_of(source: ClassSource | None) -> dict[str, Any]:
    """Returns the literal defaults of a class's constructor."""
    defaults: dict[str, Any] = {}
    for parameter in source.parameters if source is not None else ():
        if parameter.default is not None:
            with contextlib.suppress(ValueError, SyntaxError):
                defaults[parameter.name] = ast.literal_eval(parameter.default)
    return defaults


def _same(default: Any, value: Any) -> bool:
    as_list = list(default) if isinstance(default, tuple) else default
    return bool(as_list == value) and isinstance(as_list, bool) == isinstance(value, bool)
