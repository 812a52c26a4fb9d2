"""Scan of a command line and its configs for the names in them, before anything is imported.

``dlo`` imports a plug-in only when a config names it. So, before the real parser is built, this module collects every
string in the configs and on the command line, and the registry imports those that are names of plug-ins. A string that
only looks like such a name costs an import and changes nothing else.

Job files for other tools contain options of those tools; a plug-in translates them, by an entry point in the group
``dlo_framework.options``. Its name is the option; its function takes the option's value, empty if there is none, and
returns dlo's options by name::

    dlo_framework.options =
        other_config = my_package.options:use_other_config

:class:`CommandParser` parses a command's own arguments, and scans the options of ``dlo fit`` that follow.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import yaml

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.extensions import format_origin, installed_points, load_function
from dlo_framework.run import runs
from dlo_framework.yaml_text import load_yaml, parse_yaml, read_yaml

#: Group of the entry points of options that plug-ins translate.
OPTIONS_GROUP = "dlo_framework.options"


@dataclasses.dataclass(frozen=True)
class ConfigScan:
    """Content of a command line, as far as it can be known without importing anything.

    Attributes:
        argv: Arguments, with each config's name replaced by its path.
        configs: Contents of the configs by path, in order.
        plugins: Modules and files that the user wants imported.
        strings: All strings of the configs and of the command line.
    """

    argv: list[str]
    configs: dict[str, Any]
    plugins: list[str]
    strings: list[str]


def scan(argv: list[str]) -> ConfigScan:
    """Reads the arguments after ``dlo``, and the configs that they name.

    Raises:
        DloError: If a config is missing, is not YAML, or is not a mapping.
    """
    words: list[str] = []
    configs: dict[str, Any] = {}
    plugins: list[str] = []
    strings: list[str] = []
    for option, value in translate_options(_iterate_options(argv)):
        if option in ("--config", "-c") and value is not None:
            path = resolve_config(value)
            content = read_config(path)
            _report_replaced(configs, path, content)
            configs[path] = content
            plugins += parse_plugin_list(configs[path].get("plugins"))
            strings += collect_strings(configs[path])
            words += [option, path]
            continue
        if option.rstrip("+") == "--plugins" and value is not None:
            plugins += parse_plugin_list(parse_yaml(value, "--plugins"))
        if option == "--print_config" and value is not None:
            words.append(f"{option}={value}")  # jsonargparse takes its value only in the same word.
            continue
        words += [option] if value is None else [option, value] if option else [value]
        strings += [value] if value is not None else []
    return ConfigScan(
        words, configs, plugins, strings + [text for text in strings for text in _collect_inline_strings(text)]
    )


def translate_options(options: Iterable[tuple[str, str | None]]) -> Iterator[tuple[str, str | None]]:
    """Yields (option, value) pairs, with the options that plug-ins translate replaced by dlo's own.

    Raises:
        DloError: If two packages have an option, its function cannot be imported, or the function refuses the value.
    """
    points = installed_points().select(group=OPTIONS_GROUP)
    for option, value in options:
        matches = [point for point in points if option == f"--{point.name}"]
        if len(matches) > 1:
            origins = " and in ".join(sorted(map(format_origin, matches)))
            raise DloError(f"option names must be unique, got '{option}' in {origins}; uninstall one")
        if matches:
            yield from load_function(matches[0], "option")(value or "").items()
        else:
            yield option, value


def _report_replaced(before: dict[str, Any], path: str, content: dict[str, Any]) -> None:
    """Prints which lists of earlier configs a config replaces, as each parser of YAML does; `callbacks+:` would add."""
    trainer = content.get("trainer") or {}
    for key in [key for key in ("callbacks", "logger", "plugins") if key in trainer]:
        items = trainer[key] if isinstance(trainer[key], list) else [trainer[key]]
        for other, config in reversed(before.items()):
            old = (config.get("trainer") or {}).get(key)
            if not isinstance(old, list):
                continue
            lost = [item.get("class_path") if isinstance(item, dict) else item for item in old if item not in items]
            if lost and runs.is_first_process():
                names = ", ".join(str(name).rpartition(".")[2] for name in lost)
                print(f"{path}: trainer.{key} replaces {names} of {other}; '{key}+:' adds to them", file=sys.stderr)
            break


def _iterate_options(argv: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yields (option, value); a bare word is ``("", word)``, an option that takes no value ``(option, None)``."""
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if not word.startswith("-"):
            yield "", word
        elif "=" in word:
            option, value = word.split("=", 1)
            yield option, value
        elif position < len(argv) and not argv[position].startswith("-"):
            yield word, argv[position]
            position += 1
        else:
            yield word, None


def read_config(path: str) -> dict[str, Any]:
    """Reads one YAML config.

    Raises:
        DloError: If :func:`~dlo_framework.yaml_text.read_yaml` refuses it, or it is not a mapping.
    """
    content = read_yaml(path, "config")
    if content is None:
        raise DloError(f"{path}: the config is empty; `dlo configs quickstart` prints one to start from")
    if not isinstance(content, dict):
        raise DloError(f"{path}: a config must be a mapping of keys to values, got a {type(content).__name__}")
    trainer = content.get("trainer", {})
    if not isinstance(trainer, dict | None):
        raise DloError(f"{path}: trainer must be a mapping, such as max_epochs: 3, got {trainer!r}")
    return content


def parse_plugin_list(value: Any) -> list[str]:
    """Returns the value of ``plugins:`` as a list; it may be absent, one string, or several."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise DloError(f"plugins must be a list of modules and files, such as [my_pkg.mod, ./file.py], got {value!r}")


def collect_strings(content: Any) -> list[str]:
    """Returns all strings in nested mappings and lists, without the keys."""
    if isinstance(content, dict):
        return [text for value in content.values() for text in collect_strings(value)]
    if isinstance(content, list):
        return [text for value in content for text in collect_strings(value)]
    return [content] if isinstance(content, str) else []


def _collect_inline_strings(text: str) -> list[str]:
    """Returns the strings inside a value that is YAML itself: ``--trainer.callbacks '[{class_path: X}]'``."""
    if not text.lstrip().startswith(("{", "[")):
        return []
    try:
        return collect_strings(load_yaml(text, "a value on the command line"))
    except yaml.YAMLError:
        return []  # The real parser reports the error.


def list_shipped_configs() -> dict[str, Path]:
    """Returns the paths of the shipped configs by name, without the ending (``imagenet/coatnet_0``)."""
    root = Path(str(resources.files("dlo_framework.configs")))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def resolve_config(name: str) -> str:
    """Returns the path of the config ``name``, which is a file or the name of a shipped config.

    Raises:
        DloError: If it is neither; the message has the nearest match.
    """
    if Path(name).is_file():
        return name
    shipped = list_shipped_configs()
    key = name.removesuffix(".yaml").removesuffix(".yml")
    if key in shipped:
        return str(shipped[key])
    short = key.removeprefix("configs/")
    if short in shipped:
        hint = f"; the shipped one is called '{short}': --config {short}"
    else:
        folder = Path(name).parent
        beside = [str(path) for path in folder.glob("*.y*ml")] if folder.is_dir() else []
        hint = did_you_mean(key, shipped) or did_you_mean(name, beside)
    hint += " " if hint.endswith("?") else "; "
    raise DloError(f"no config '{name}': neither a file nor a shipped config{hint}`dlo configs` lists the shipped")


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser for a command of ``dlo``.

    Args:
        prog: Words that call the command, such as ``dlo hello``.
        options: Other options of ``argparse.ArgumentParser``; line breaks in texts are kept.
    """

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Raises a :class:`DloError`, where argparse would print its usage and exit."""
        raise DloError(f"{message}; see '{self.prog} --help'")

    def parse_with_run(self, argv: Sequence[str]) -> tuple[argparse.Namespace, ConfigScan]:
        """Parses the command's own options, and scans all others as those of ``dlo fit``.

        Returns:
            The command's options, and the rest with its configs.

        Raises:
            DloError: If an option is invalid, or no ``--config`` is given.
        """
        self.allow_abbrev = False  # An abbreviation could be meant for `dlo fit`.
        options, words = self.parse_known_args(argv)
        config_scan = scan(["fit", *words])
        if not config_scan.configs:
            raise DloError(
                f"{self.prog.removeprefix('dlo ')}: --config must name a config, got none; add --config x.yaml"
            )
        return options, config_scan
