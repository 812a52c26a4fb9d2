"""Record of how an object was built, as far as the object knows, in the form of a config's ``class_path``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any


def describe_object(built: Any) -> dict[str, Any]:
    """Returns an object's class, and the arguments of its constructor that it keeps as plain data.

    They are read from Lightning's ``hparams``, or from attributes of the same names; others are left out.
    """
    cls = type(built)
    known = {**vars(built), **dict(getattr(built, "hparams", {}))}
    names = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
    arguments = {name: _plain(known[name]) for name in names if name in known and is_plain(known[name])}
    described: dict[str, Any] = {"class_path": f"{cls.__module__}.{cls.__qualname__}"}
    return described | ({"init_args": arguments} if arguments else {})


def is_plain(value: Any) -> bool:
    """Returns whether a value is made of texts, numbers, None, lists and mappings."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return type(value) in (str, int, float, bool, type(None)) or isinstance(value, Path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
