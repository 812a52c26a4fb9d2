"""Resolution of plug-ins' short names in configs and on the command line, where another class has the same name.

jsonargparse finds a class by its short name among all imported classes, and refuses a name that two of them share:
``FSDPStrategy`` is Lightning's too. A plug-in's name means the plug-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dlo_framework.cli.parse_errors import KINDS
from dlo_framework.registry import Plugin
from dlo_framework.yaml_text import load_yaml


def expand_short_names(content: Any, class_paths: Mapping[str, str]) -> Any:
    """Returns a config, or a section of one, with the short names under ``class_path`` expanded.

    Args:
        content: Nested mappings and lists.
        class_paths: Full class path of each short name.
    """
    if isinstance(content, dict):
        full = {key: expand_short_names(value, class_paths) for key, value in content.items()}
        name = full.get("class_path")
        return {**full, "class_path": class_paths[name]} if isinstance(name, str) and name in class_paths else full
    if isinstance(content, list):
        return [expand_short_names(item, class_paths) for item in content]
    return content


def expand_arguments(argv: list[str], class_paths: Mapping[str, str]) -> list[str]:
    """Returns a command line with the short names expanded that an option for a class has as its value.

    Args:
        argv: Arguments, such as ``--trainer.strategy.class_path FSDPStrategy`` or ``--data=DigitsData``.
        class_paths: Full class path of each short name.
    """
    found = list(argv)
    for number, word in enumerate(argv):
        option, joined, value = word.partition("=")
        before = argv[number - 1] if number else ""
        if joined and value in class_paths and _names_a_class(option):
            found[number] = f"{option}={class_paths[value]}"
        elif word in class_paths and _names_a_class(before):
            found[number] = class_paths[word]
    return found


def _names_a_class(option: str) -> bool:
    key = option.removeprefix("--").rstrip("+")
    return option.startswith("--") and (key in KINDS or key.endswith(".class_path"))


def get_class_paths(plugins: Iterable[Plugin]) -> dict[str, str]:
    """Returns the full class path of each short name.

    Aliases of a strategy are left out: they are names in Lightning's registry, which also set arguments.
    """
    return {
        name: plugin.class_path
        for plugin in plugins
        for name in ((plugin.name,) if plugin.kind == "strategy" else plugin.names)
    }


def prefer_plugins(plugins: Iterable[Plugin]) -> None:
    """Makes jsonargparse resolve plug-ins' short names to the plug-ins, in everything that it parses afterwards."""
    import jsonargparse
    import yaml

    loader: Callable[[str], Any] = jsonargparse.get_loader("yaml")
    loader = getattr(loader, "without_plugins", loader)
    class_paths = get_class_paths(plugins)

    def load(text: str) -> Any:
        load_yaml(text, "a value")  # For what it refuses; jsonargparse reads numbers in another way.
        return expand_short_names(loader(text), class_paths)

    load.without_plugins = loader  # type: ignore[attr-defined]
    jsonargparse.set_loader("yaml", load, (yaml.YAMLError,))
