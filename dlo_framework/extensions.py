"""Loads the entry points by which packages extend the core, with errors that name the distribution and the cause."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from typing import Any, TypeVar, cast

from dlo_framework.errors import DloError

T = TypeVar("T")
_PREFIX = "dlo_framework."


def list_extensions() -> list[metadata.EntryPoint]:
    """Returns the entry points of all installed packages that extend dlo, other than plug-ins, by group and name.

    These are commands and their options, checkpoint stores and formats, image models, predictions of memory, LR
    suggestions and pipeline schedules. Nothing is imported.
    """
    points = installed_points()
    groups = [
        group for group in points.groups if group.startswith(_PREFIX) and not group.startswith(f"{_PREFIX}plugins.")
    ]
    found = {point for group in groups for point in points.select(group=group)}
    return sorted(found, key=lambda point: (point.group, point.name))


def installed_points() -> metadata.EntryPoints:
    """Returns the entry points of all installed packages.

    The metadata of every package is read once a process, and again after an install or a change of ``sys.path``.
    """
    return _read_points(tuple((entry, _modified(entry)) for entry in sys.path))


@lru_cache(maxsize=1)
def _read_points(path: tuple[tuple[str, int], ...]) -> metadata.EntryPoints:
    return cast(metadata.EntryPoints, metadata.entry_points())  # Python 3.11 has another class of the same methods.


def _modified(entry: str) -> int:
    """Returns when an entry of ``sys.path`` was last changed, in nanoseconds; 0 if there is none of this name."""
    try:
        return os.stat(entry or ".").st_mtime_ns
    except OSError:
        return 0


def load_function(point: metadata.EntryPoint, kind: str) -> Callable[..., Any]:
    """Imports the function or class of an entry point.

    Args:
        point: Entry point.
        kind: Kind of extension, for the error, such as ``command``.

    Raises:
        DloError: If the import fails, or finds neither a function nor a class.
    """
    try:
        found = point.load()
    except (Exception, SystemExit) as error:
        raise DloError(f"{_label(point, kind)} failed to import: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise DloError(f"{_label(point, kind)} must be a function, got {point.value}, {found!r}; fix its entry point")
    function: Callable[..., Any] = found
    return function


def load_instance(point: metadata.EntryPoint, kind: str, base: type[T]) -> T:
    """Imports the class of an entry point, and returns an instance, constructed without arguments.

    Raises:
        DloError: If the import or the constructor fails, or the instance is not one of ``base``.
    """
    function = load_function(point, kind)
    try:
        made = function()
    except Exception as error:
        raise DloError(f"{_label(point, kind)} failed to construct: {type(error).__name__}: {error}") from error
    if not isinstance(made, base):
        raise DloError(
            f"{_label(point, kind)} must be a subclass of {base.__module__}.{base.__name__}, got {point.value}; fix its"
            " entry point"
        )
    return made


def format_origin(point: metadata.EntryPoint) -> str:
    """Returns the distribution of an entry point, with its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"


def _label(point: metadata.EntryPoint, kind: str) -> str:
    return f"{kind} '{point.name}' ({format_origin(point)})"
