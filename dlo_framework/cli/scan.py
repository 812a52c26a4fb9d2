"""Reading a command line and its configs for the names in them, before anything is imported.

``dlo`` imports a plug-in only when a config names it. So, before the real parser is built, this module takes
every string in the configs and on the command line; the registry imports those that are names of plug-ins.
A string that merely looks like one costs an import and changes nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import yaml

from dlo_framework.cli.shipped import resolve_config
from dlo_framework.errors import DloError


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a command line says, as far as it can be known without importing anything.

    Attributes:
        argv: the words, with each config's name replaced by its path.
        configs: the configs' paths, in order, and their contents.
        plugins: modules and files that the user wants imported.
        strings: every string of the configs and of the command line.
    """

    argv: list[str]
    configs: dict[str, Any]
    plugins: list[str]
    strings: list[str]


def scan(argv: list[str]) -> Scan:
    """Reads the words after ``dlo``, and the configs they name.

    Raises:
        DloError: on a config that is missing, or is not YAML, or is not a mapping.
    """
    words: list[str] = []
    configs: dict[str, Any] = {}
    plugins: list[str] = []
    strings: list[str] = []
    for option, value in _options(argv):
        if option in ("--config", "-c") and value is not None:
            path = resolve_config(value)
            configs[path] = read_config(path)
            plugins += as_list(configs[path].get("plugins"))
            strings += leaves(configs[path])
            words += [option, path]
            continue
        if option.rstrip("+") == "--plugins" and value is not None:
            plugins += as_list(yaml.safe_load(value))
        words += [option] if value is None else [option, value] if option else [value]
        strings += [value] if value is not None else []
    return Scan(words, configs, plugins, strings + [leaf for text in strings for leaf in _inline(text)])


def _options(argv: list[str]) -> Iterator[tuple[str, str | None]]:
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
        DloError: if it cannot be read, is not YAML (line and column are named), or not a mapping.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except UnicodeDecodeError as error:
        raise DloError(f"{path}: not a text file, so not a config") from error
    except OSError as error:
        raise DloError(f"cannot read the config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise DloError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        raise DloError(f"{path}: the config is empty; `dlo configs quickstart` prints one to start from")
    if not isinstance(content, dict):
        raise DloError(f"{path}: a config is a mapping of keys to values, but this is a {type(content).__name__}")
    trainer = content.get("trainer", {})
    if not isinstance(trainer, dict | None):
        raise DloError(f"{path}: trainer: takes keys, such as max_epochs: 3, but was {trainer!r}")
    return content


def as_list(value: Any) -> list[str]:
    """Returns ``plugins:`` as a list: it may be absent, one string, or several."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise DloError(f"plugins: is a list of modules and files, such as [my_pkg.mod, ./file.py], but was {value!r}")


def leaves(content: Any) -> list[str]:
    """Returns every string in a nest of mappings and lists, keys left out."""
    if isinstance(content, dict):
        return [leaf for value in content.values() for leaf in leaves(value)]
    if isinstance(content, list):
        return [leaf for value in content for leaf in leaves(value)]
    return [content] if isinstance(content, str) else []


def _inline(text: str) -> list[str]:
    """Returns the strings inside a value that is YAML itself: ``--trainer.callbacks '[{class_path: X}]'``."""
    if not text.lstrip().startswith(("{", "[")):
        return []
    try:
        return leaves(yaml.safe_load(text))
    except yaml.YAMLError:
        return []  # The real parser says what is wrong with it.
