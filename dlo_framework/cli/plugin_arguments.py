"""Arguments of the command line that name plug-ins: short names of classes, and options of callbacks.

jsonargparse finds a class by its short name among all imported classes, and refuses a name that two of them share:
``FSDPStrategy`` is Lightning's too. Here a plug-in's name means the plug-in.

jsonargparse sets options of a list's last item only. So an option that names a callback by
``--trainer.callbacks.OneCycle.max_lr 0.1``, or that only one of a config's callbacks takes, is written into their list;
a config's list follows the config as an option.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import yaml

from dlo_framework.cli.parse_errors import KINDS, find_class, get_value, list_parameters
from dlo_framework.errors import DloError, unknown_hint
from dlo_framework.registry import Plugin, Registry
from dlo_framework.yaml_text import load_yaml

_PATH = "trainer.callbacks"
_KEY = f"--{_PATH}"
_CONFIG = ("--config", "-c")
_OPTION = re.compile(rf"{re.escape(_KEY)}\.(?:([A-Z]\w*)\.)?(?:init_args\.)?([a-z]\w*(?:\.\w+)*)")


def place_callback_options(argv: list[str], configs: Mapping[str, Any], registry: Registry) -> list[str]:
    """Returns a command line whose options of callbacks are in the lists of callbacks.

    Args:
        argv: Arguments, an option and its value as two words.
        configs: Contents of the configs by path.
        registry: Registry with the plug-ins that the command line names.

    Raises:
        DloError: If an option names no callback of the run, or several take it.
    """
    lists: dict[int, list[Any]] = {}
    for place, (word, value) in enumerate(itertools.pairwise(argv)):
        items = _read_list(word, value, configs)
        if word in _CONFIG and get_value(configs.get(value), f"{_PATH}+"):  # It adds to what is before.
            items = [item for at in reversed(_reached_lists(argv, lists, place)) for item in lists[at]] + items
        if items:
            lists[place] = copy.deepcopy(items)
    changed: set[int] = set()
    removed: set[int] = set()
    for place, word in enumerate(argv[:-1]):
        match = _OPTION.fullmatch(word)
        if match is None or match[2] == "class_path":
            continue
        name, option = match.groups()
        reached = _reached_lists(argv, lists, len(argv) if name else place)
        if not name and (not reached or argv[reached[0]].endswith("+")):
            continue  # It is the last callback's, which the command line has just added.
        named = [(at, number, _name_of(item)) for at in reached for number, item in enumerate(lists[at])]
        wanted = [item for item in named if (item[2] == name if name else _takes(item[2], option, registry))]
        owners = list(dict.fromkeys(own for _, _, own in wanted))
        if name and not wanted:
            hint = unknown_hint(name, [own for _, _, own in named], "it has")
            raise DloError(f"'{word}' must name a callback of the run, got {name}{hint}")
        if len(wanted) > 1:
            fix = f"write {_KEY}.{owners[0]}.{option}" if len(owners) > 1 else "set it in the config"
            raise DloError(f"'{word}' must be of one callback, got {' and '.join(owners)}, which take it; {fix}")
        for at, number, _ in wanted:
            _set_option(lists[at], number, option, argv[place + 1])
            changed.add(at)
            removed |= {place, place + 1}
    return [part for place in range(len(argv)) if place not in removed for part in _write(argv, place, lists, changed)]


def _read_list(word: str, value: str, configs: Mapping[str, Any]) -> list[Any]:
    """Returns the callbacks that an option sets or adds, or that its config has."""
    if word in _CONFIG:
        config = configs.get(value)
        callbacks = get_value(config, _PATH) or get_value(config, f"{_PATH}+")
    elif word in (_KEY, f"{_KEY}+"):
        callbacks = value
        with contextlib.suppress(yaml.YAMLError):  # The parser reports it.
            callbacks = load_yaml(value, word)
    else:
        return []
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []


def _reached_lists(argv: list[str], lists: Mapping[int, Any], end: int) -> list[int]:
    """Returns the places of the lists that are in effect before a place, the last one first."""
    places: list[int] = []
    for place in sorted((place for place in lists if place < end), reverse=True):
        places.append(place)
        if not argv[place].endswith("+"):
            break
    return places


def _name_of(item: Any) -> str:
    return str(item.get("class_path") if isinstance(item, dict) else item).rpartition(".")[2]


def _takes(name: str, option: str, registry: Registry) -> bool:
    """Returns whether a callback's constructor takes an option."""
    with contextlib.suppress(DloError):
        cls = find_class(name, "callback", registry)
        return cls is not None and option.partition(".")[0] in (list_parameters(cls) or ())
    return False


def _set_option(items: list[Any], number: int, option: str, value: str) -> None:
    if not isinstance(items[number], dict):
        items[number] = {"class_path": items[number]}
    section = items[number]
    *parents, last = ["init_args", *option.split(".")]
    for parent in parents:
        if not isinstance(section.get(parent), dict):
            section[parent] = {}
        section = section[parent]
    section[last] = value


def _write(argv: list[str], place: int, lists: Mapping[int, list[Any]], changed: set[int]) -> list[str]:
    """Returns the words at a place: those that were there, and changed callbacks as JSON after their option."""
    before = place - 1
    if before not in changed:
        return [argv[place]]
    items = json.dumps(lists[before], default=str)
    return [argv[place], _KEY, items] if argv[before] in _CONFIG else [items]


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
    expanded = list(argv)
    for number, word in enumerate(argv):
        option, joined, value = word.partition("=")
        before = argv[number - 1] if number else ""
        if joined and value in class_paths and _names_a_class(option):
            expanded[number] = f"{option}={class_paths[value]}"
        elif word in class_paths and _names_a_class(before):
            expanded[number] = class_paths[word]
    return expanded


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
