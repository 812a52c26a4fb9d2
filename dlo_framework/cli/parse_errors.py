"""Error messages for a config that jsonargparse refuses: file, key, value, and the nearest valid name.

jsonargparse detects the error, but its text describes types. So, after it has refused, this module walks the configs
again, checks them against the constructors' signatures, and reports the first fault that a user can act on. Faults that
the walk does not cover, mostly wrong types, are taken from jsonargparse's text and printed on one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import yaml

from dlo_framework.cli.config_scan import ConfigScan, list_shipped_configs
from dlo_framework.cli.lightning_cli import ParseError
from dlo_framework.errors import DloError, did_you_mean, dlo_error_in, nearest, unknown_hint
from dlo_framework.registry import Registry
from dlo_framework.registry.class_source import SourceNotFoundError, read_class
from dlo_framework.registry.registry import base_of
from dlo_framework.run_setup import OTHER_NAMES, explain_precision
from dlo_framework.yaml_text import load_yaml, parse_yaml

#: Kind of class that a key takes: that of a plug-in, or a logger.
KINDS = {
    "model": "task",
    "data": "data",
    "trainer.callbacks": "callback",
    "trainer.logger": "logger",
    "trainer.strategy": "strategy",
}


def explain_parse_error(error: ParseError, config_scan: ConfigScan, registry: Registry) -> DloError:
    """Returns the message for a command line or config that the parser refused."""
    cause = dlo_error_in(error)
    if cause is not None:
        return cause
    known = error.known_keys
    for path, config in config_scan.configs.items():
        fault = next(_find_faults(config, known, registry), None)
        if fault:
            return DloError(f"{path}: {fault}")
    keys, given = _find_key_and_value(str(error))
    if keys in KINDS and given.isidentifier():
        return registry.unknown(given, KINDS[keys], others=_list_imported_names(KINDS[keys]))
    if keys in KINDS and re.fullmatch(r"[\w.]+", given):
        fault = next(_find_class_faults(keys, given, given, registry), None)
        if fault:
            return DloError(fault)
    if keys == "trainer.precision":
        return DloError(explain_precision(given))
    required = re.search(r"the following arguments are required: (\w+)", str(error))
    if required and keys in KINDS:
        return DloError(_explain_required(keys, required.group(1), given))
    stray = re.search(r"unrecognized arguments: (\S+)", str(error))
    if stray:
        return DloError(_explain_unknown_option(stray.group(1).split("=")[0], known, config_scan, registry))
    nested = re.match(r"NestedArg\(key='([^']+)'", given)
    if nested:
        return DloError(_explain_unknown_argument(keys, nested.group(1), config_scan, registry))
    if keys in KINDS and not given.startswith(("Namespace(", "{'")):
        with contextlib.suppress(DloError):
            parse_yaml(given, f"--{keys}")
            return DloError(_explain_class(keys, given))
        return DloError(f"{keys} must be valid YAML, got {given}; check its brackets and quotes")
    return DloError(_format_in_one_line(str(error), known))


def _explain_class(key: str, given: str) -> str:
    """Returns the message for a value that cannot be a class: a path of a file, ``module:Class``, a list."""
    module, _, name = given.partition(":")
    fix = "`dlo plugins` lists names"
    if given.endswith(".py"):
        fix = f"write --plugins {given} --{key} CLASS"
    elif name.isidentifier():
        fix = f"write {module}.{name}"
    return f"{key} must be a class by its name or path, such as my_pkg.mod.Class, got {given or 'nothing'}; {fix}"


def _find_faults(config: dict[str, Any], known: list[str], registry: Registry) -> Iterator[str]:
    for name in config:
        if not any(key == name or key.startswith(f"{name}.") for key in known):
            yield _explain_unknown_key(name, known)
    trainer = config.get("trainer")
    if isinstance(trainer, dict):
        for name in trainer:
            if f"trainer.{name}" not in known:
                yield _explain_unknown_key(f"trainer.{name}", known)
    for key, value in _iterate_values(config):
        named = value.get("class_path") if isinstance(value, dict) else value if key in KINDS else None
        if isinstance(named, str):
            yield from _find_class_faults(key, named, value, registry)


def _iterate_values(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of everything in a nest; a list's items have the list's key."""
    if isinstance(content, dict):
        if key:
            yield key, content
        for name, value in content.items():
            yield from _iterate_values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(content, list):
        for value in content:
            yield from _iterate_values(value, key)
    else:
        yield key, content


def _find_class_faults(key: str, class_path: str, value: Any, registry: Registry) -> Iterator[str]:
    kind = KINDS.get(key)
    if kind == "strategy" and isinstance(value, str):
        return  # A name in Lightning's registry, which the trainer checks.
    if kind == "strategy" and class_path in registry.names(kind):
        plugin = registry.get(class_path, kind)
        if class_path != plugin.name:
            yield (
                f"class_path must be a class, got '{class_path}', an alias of {plugin.name} with preset arguments;"
                f" write {key.split('.')[-1]}: {class_path}, or class_path: {plugin.name} with init_args"
            )
    try:
        cls = find_class(class_path, kind, registry)
    except DloError as error:
        yield str(error)
        return
    base = _base_of(kind)
    if cls is not None and base is not None and not issubclass(cls, base):
        yield f"{key} must be a {base.__name__}, got class_path '{class_path}', which does not derive from it"
    if cls is None or not isinstance(value, dict):
        return
    for name in value:
        if name not in ("class_path", "init_args", "dict_kwargs"):
            yield f"unknown key '{key}.{name}'{did_you_mean(name, ['class_path', 'init_args'])}"
    accepted = list_parameters(cls)
    for name, option in (value.get("init_args") or {}).items():
        if isinstance(option, dict) and "class_path" not in option:
            yield from _find_option_faults(f"{key}.init_args.{name}", cls, name, option)
        if accepted is not None and name not in accepted:
            yield _format_unknown(f"{key}.init_args.{name}", name, cls, accepted)


def _find_option_faults(key: str, cls: type, name: str, value: dict[str, Any]) -> Iterator[str]:
    """Yields the unknown keys of an option whose value is a class with fields of its own: ``lora: {rnk: 4}``."""
    inner = _find_option_class(cls, name)
    accepted = list_parameters(inner) if inner is not None else None
    for field in value if inner is not None and accepted else ():
        if field not in accepted:  # type: ignore[operator]
            yield _format_unknown(f"{key}.{field}", field, inner, accepted)  # type: ignore[arg-type]


def _find_option_class(cls: type, name: str) -> type | None:
    """Returns the class that a class's option takes, such as a dataclass; None where it takes none, or several."""
    for base in inspect.getmro(cls):
        if name in getattr(vars(base).get("__init__"), "__annotations__", {}):
            try:
                hint = typing.get_type_hints(base.__init__)[name]  # type: ignore[misc]
            except NameError:
                return None
            types = [each for each in (typing.get_args(hint) or (hint,)) if each is not type(None)]
            return types[0] if len(types) == 1 and _has_options(types[0]) else None
    return None


def _has_options(kind: Any) -> bool:
    """Returns whether a value of a type is written as a mapping of its constructor's arguments."""
    if not inspect.isclass(kind) or typing.get_origin(kind) is not None or kind.__module__ == "builtins":
        return False
    return dataclasses.is_dataclass(kind) or "__init__" in vars(kind)


def _format_unknown(key: str, name: str, cls: type, accepted: list[str]) -> str:
    return f"unknown key '{key}' of {cls.__name__}{unknown_hint(name, accepted, 'it takes')}"


def find_class(class_path: str, kind: str | None, registry: Registry) -> type | None:
    """Returns the class that a class path names; None where this walk cannot resolve it.

    Raises:
        DloError: If the class does not exist, or a config may not name it.
    """
    if "." not in class_path:
        if class_path in registry.names(kind):
            return registry.load(class_path, kind)
        cls = _list_imported_subclasses(kind).get(class_path)
        if cls is None and kind is not None:
            raise registry.unknown(class_path, kind, others=_list_imported_names(kind))
        return cls
    registry.allow_class_path(class_path)
    module, name = class_path.rsplit(".", 1)
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise DloError(f"class_path '{class_path}': cannot import {module}: {error}") from error
    if not hasattr(home, name):
        classes = [other for other, item in vars(home).items() if inspect.isclass(item)]
        raise DloError(f"class_path '{class_path}': {module} has no {name}{did_you_mean(name, classes)}")
    attribute = getattr(home, name)
    return attribute if inspect.isclass(attribute) else None


def _list_imported_names(kind: str) -> list[str]:
    """Returns the short names of imported classes of a kind that a config may want: Lightning's and users' own."""
    subclasses = _list_imported_subclasses(kind).items()
    wanted = [(name, cls) for name, cls in subclasses if not name.startswith("_") and not inspect.isabstract(cls)]
    return [name for name, cls in wanted if not cls.__module__.startswith("dlo_")]


def _explain_unknown_argument(key: str, name: str, config_scan: ConfigScan, registry: Registry) -> str:
    """Returns the message for ``--model.init_args.lrr``, with the nearest argument of the class under the key."""
    name = name.removeprefix("init_args.")
    given = _find_class_path(key, config_scan)
    alias = next((plugin for plugin in registry.plugins() if given in plugin.names and given != plugin.name), None)
    if alias is not None:
        return (
            f"'{key}.{name}' must follow a class, got the alias '{given}', which takes no options; name the class:"
            f" --{key} {alias.name} --{key}.{name} ..."
        )
    cls = find_class(given, KINDS.get(key), registry) if given else None
    accepted = list_parameters(cls) if cls is not None else None
    (option, _, field), owner = name.partition("."), cls
    if cls is None and "." in key:  # An option of the class under the key above, such as `model.lora`.
        above, _, option = key.rpartition(".")
        named, field = _find_class_path(above, config_scan), name
        owner = find_class(named, KINDS.get(above), registry) if named else None
    inner = _find_option_class(owner, option) if owner is not None and field else None
    if inner is not None:
        return _format_unknown(f"{key}.{name}", field, inner, list_parameters(inner) or [])
    if cls is None or not accepted:
        return f"unknown key '{key}.{name}'"
    if name == "init_args":  # --model.init_args '{width: 32, lrr: 1}'
        name = next((each for each in _find_given_options(key, config_scan) if each not in accepted), name)
    return _format_unknown(f"{key}.{name}", name, cls, accepted)


def _find_given_options(key: str, config_scan: ConfigScan) -> list[str]:
    """Returns the names in a mapping that the command line gives as all options of a key."""
    for number, word in enumerate(config_scan.argv):
        option, _, value = word.partition("=")
        if option == f"--{key}.init_args":
            text = value or "".join(config_scan.argv[number + 1 : number + 2])
            with contextlib.suppress(yaml.YAMLError):
                options = load_yaml(text, option)
                return list(map(str, options)) if isinstance(options, dict) else []
    return []


def _find_class_path(key: str, config_scan: ConfigScan) -> str:
    """Returns the class that the command line, or else the last config, names under a key; the last of a list."""
    words = config_scan.argv
    for position in reversed(range(len(words) - 1)):
        if words[position].rstrip("+") in (f"--{key}", f"--{key}.class_path"):
            return words[position + 1]
    for config in reversed(config_scan.configs.values()):
        value = get_value(config, key)
        value = value[-1] if isinstance(value, list) and value else value
        value = value.get("class_path") if isinstance(value, dict) else value
        if isinstance(value, str):
            return value
    return ""


def get_value(config: Any, key: str) -> Any:
    """Returns what a config has under a dotted key; None where it has nothing."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _base_of(kind: str | None) -> type | None:
    """Returns the class that those of a kind derive from; None for a key that takes any class."""
    if kind == "logger":
        from lightning.pytorch.loggers import Logger

        return Logger
    return base_of(kind) if kind is not None else None


def _list_imported_subclasses(kind: str | None) -> dict[str, type]:
    """Returns the imported classes of a kind by short name, which jsonargparse accepts too: ``ModelCheckpoint``."""
    base = _base_of(kind)
    stack = [base] if base is not None else []
    seen: dict[str, type] = {}
    while stack:
        cls = stack.pop()
        if cls.__name__ not in seen:
            seen[cls.__name__] = cls
            stack += cls.__subclasses__()
    return seen


def list_parameters(cls: type) -> list[str] | None:
    """Returns the names that a class's constructor takes, those that it passes on too; None where it takes any."""
    names: list[str] = []
    for base in inspect.getmro(cls):
        if "__init__" not in vars(base):
            continue
        rest = False
        for parameter in list(inspect.signature(base.__init__).parameters.values())[1:]:  # type: ignore[misc]
            if parameter.kind is parameter.VAR_KEYWORD:
                rest = True
            elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in names:
                names.append(parameter.name)
        if not rest:
            return names
        with contextlib.suppress(SourceNotFoundError):
            source = read_class(f"{base.__module__}:{base.__qualname__}")
            if source.parameters and not source.takes_any:
                return list(dict.fromkeys([*names, *(parameter.name for parameter in source.parameters)]))
    return names or None


def _explain_required(key: str, name: str, given: str) -> str:
    """Returns the message for a class under ``key`` without an argument that it requires."""
    classes = re.findall(rf"class_path='([^']+)', init_args=Namespace\((?:(?!class_path).)*?\b{name}=None", given)
    cls = classes[-1].rpartition(".")[2] if classes else "the class"
    return (
        f"{name} of {cls} under {key} must be set, got none; set init_args: {{{name}: ...}} in the config, or add"
        f" --{key}.{name} VALUE after the class"
    )


def _find_meant(name: str, keys: list[str]) -> list[str]:
    """Returns the keys that end in the last part of a name, or that other tools call so."""
    last = name.rpartition(".")[2]
    meant = OTHER_NAMES.get(last.replace("-", "_"), "")
    same = [key for key in keys if key.rpartition(".")[2] == last and key != name]
    return list(dict.fromkeys([*([meant] if meant.split(" ")[0] in keys else []), *same]))


def _explain_unknown_option(option: str, known: list[str], config_scan: ConfigScan, registry: Registry) -> str:
    """Returns the message for an option that does not exist, with the key of the config's classes that is meant."""
    if not option.startswith("-"):
        is_config = option.endswith((".yaml", ".yml")) or option in list_shipped_configs()
        return f"an option must begin with --, got '{option}'" + (f"; write --config {option}" if is_config else "")
    name = option.lstrip("-")
    for key in KINDS:  # `--model.init_args.lora.rnk`, whose class takes `lora` as a whole.
        pattern = rf"--{key}(\.init_args)?\.{re.escape(name)}(=.*)?"
        owner = next((word for word in config_scan.argv if re.fullmatch(pattern, word)), "")
        if owner and "." in name:
            return _explain_unknown_argument(key, name, config_scan, registry)
    keys = list(known)
    for part in ("model", "data"):
        given = _find_class_path(part, config_scan)
        with contextlib.suppress(DloError):  # The message is on the option.
            cls = find_class(given, KINDS[part], registry) if given else None
            keys += [f"{part}.{parameter}" for parameter in (list_parameters(cls) if cls is not None else None) or ()]
    meant = _find_meant(name, keys)
    if meant:
        return f"unknown option '{option}'; did you mean {' or '.join(f'--{key}' for key in meant)}?"
    removed = did_you_mean(name.rpartition(".")[2], [])
    if removed:
        return f"unknown option '{option}'{removed}"
    near = nearest(name, keys) if "." in name else None
    if near is None:
        last = nearest(name, [key.rpartition(".")[2] for key in keys])
        near = next((key for key in keys if key.rpartition(".")[2] == last), None)
    return f"unknown option '{option}'" + (f"; did you mean '--{near}'?" if near else "")


def _explain_unknown_key(key: str, known: list[str]) -> str:
    """Returns ``unknown key 'trainer.max_epoch'; did you mean 'max_epochs'?``."""
    parent, _, name = key.rpartition(".")
    prefix = f"{parent}." if parent else ""
    meant = OTHER_NAMES.get(name, "").split(" ")[0]
    if meant in known:
        return f"unknown key '{key}'; did you mean '{meant}'?"
    siblings = {other.removeprefix(prefix).split(".")[0] for other in known if other.startswith(prefix)}
    return f"unknown key '{key}'{did_you_mean(name, siblings)}"


def _format_in_one_line(message: str, known: list[str]) -> str:
    """Returns jsonargparse's text as one line: key, expected type, value."""
    option = re.search(r"does not accept option '([^']+)'", message)
    if option:
        return _explain_unknown_key(option.group(1), known)
    missing = re.search(r"arguments? (?:is|are) required: (?:\w+\.)?(\w+)", message)
    if missing:
        name = missing.group(1)
        ready = "; `dlo fit --config quickstart` has all it needs" if name in ("model", "data") else ""
        return f"{name} must be set, got none; set it in a config (--config x.yaml) or by --{name} ClassName{ready}"
    keys, given = _find_key_and_value(message)
    expected = dict.fromkeys(re.findall(r"Expected an? (.+?)(?:\. Got value.*)?$", message, flags=re.MULTILINE))
    if keys and expected and given:
        # Each value may also be the path of a file with it, which is not what is meant.
        names = [_simplify_type(text) for text in expected if "NoneType" not in text and not text.startswith("path")]
        types = " or ".join(names) or "another value"
        hint = did_you_mean(given, re.findall(r"'([^']+)'", types)) if types.startswith("one of ") else ""
        return f"{keys} must be {types}, got {given!r}{hint}"
    return " ".join(message.split())


def _find_key_and_value(message: str) -> tuple[str, str]:
    """Returns the dotted key and the value that jsonargparse's text names; empty where it names none."""
    keys = ".".join(dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message)))
    given = re.search(r"(?:Given value|Got value): (.*)", message)
    return keys, given.group(1).strip() if given else ""


def _simplify_type(text: str) -> str:
    """Returns ``int`` for ``<class 'int'>``, and the choices of a ``typing.Literal``."""
    choices = re.match(r"typing\.Literal\[(.*)\]", text)
    if choices:
        return f"one of {choices.group(1)}"
    match = re.search(r"<class '([^']+)'>", text)
    return match.group(1) if match else text.strip()
