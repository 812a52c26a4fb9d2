"""Extensions of the core by installed packages: their entry points, the functions that a config names, and versions.

A set of functions that packages and users add to, such as suggestions of a learning rate, is defined by one package,
which registers its own functions::

    SUGGESTIONS: NamedFunctions[Suggest] = NamedFunctions("suggestion", "dlo_framework.lr_suggestions")

    @SUGGESTIONS.register("valley")
    def valley(rates, losses): ...

A user's file under ``plugins:`` registers in the same way. An installed package adds an entry point in the set's group,
``valley = package.module:valley``, and is imported when a config names the function.
"""

from __future__ import annotations

import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import metadata
from typing import Any, Generic, TypeVar, cast

from dlo_framework._version import __version__
from dlo_framework.errors import DloError, did_you_mean, unknown_hint

T = TypeVar("T")
_PREFIX = "dlo_framework."


def list_extensions() -> list[metadata.EntryPoint]:
    """Returns the entry points of all installed packages that extend dlo, other than plug-ins, by group and name.

    These are commands and their options, engines, checkpoint stores and formats, image models, predictions of memory,
    LR suggestions and pipeline schedules. Nothing is imported.
    """
    points = installed_points()
    groups = [
        group for group in points.groups if group.startswith(_PREFIX) and not group.startswith(f"{_PREFIX}plugins.")
    ]
    extensions = {point for group in groups for point in points.select(group=group)}
    return sorted(extensions, key=lambda point: (point.group, point.name))


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
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise DloError(f"{_label(point, kind)} failed to import: {type(error).__name__}: {error}") from error
    if not callable(loaded):
        raise DloError(f"{_label(point, kind)} must be a function, got {point.value}, {loaded!r}; fix its entry point")
    function: Callable[..., Any] = loaded
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


# --- versions of packages ------------------------------------------------------------------------------------


PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "timm",
    "transformers",
    "deepspeed",
    "jsonargparse",
    "tensorboard",
    "torchmetrics",
    "numpy",
    "simplejpeg",
    "opencv-python-headless",
)


def versions(also: Iterable[str] = ()) -> dict[str, str]:
    """Returns name to version of dlo, Python, the platform, and each installed package.

    Args:
        also: Further packages to list.
    """
    by_name = {
        "dlo_framework": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for package in (*PACKAGES, *also):
        try:
            by_name[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return by_name


def format_versions() -> str:
    """Returns :func:`versions` as aligned lines, with missing packages named."""
    installed = versions()
    lines = [f"{name:<24} {version}" for name, version in installed.items()]
    missing = [package for package in PACKAGES if package not in installed]
    if missing:
        lines.append(f"{'not installed':<24} {', '.join(missing)}")
    return "\n".join(lines)


# --- functions that a config names ---------------------------------------------------------------------------


Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])

#: Modules that have registered a function in any set.
registering_modules: set[str] = set()


class NamedFunctions(Generic[Value]):
    """Functions that a config names.

    Args:
        what: Noun for a function of the set in messages, such as ``suggestion``.
        group: Entry-point group of installed packages' functions.
        make: Function that makes a value of the set from a function and the options of :meth:`register`; None for sets
            whose values are the functions themselves.
    """

    def __init__(self, what: str, group: str, make: Callable[..., Value] | None = None) -> None:
        self.what, self.group = what, group
        self._make = make
        self._values: dict[str, tuple[Callable[..., Any], Value]] = {}

    def register(self, name: str, **options: Any) -> Callable[[Function], Function]:
        """Returns a decorator that adds a function to the set.

        Args:
            name: Name of the function in configs.
            **options: Options of ``make``.

        Raises:
            DloError: If the set has another function of this name, or no such option.
        """

        known = [] if self._make is None else list(inspect.signature(self._make).parameters)[1:]
        for option in options.keys() - set(known):
            raise DloError(
                f"{self.what} {name} must be registered with options among {', '.join(known) or 'none'}, got"
                f" {option}{did_you_mean(option, known) or '; leave it out'}"
            )

        def add(function: Function) -> Function:
            other = self._values[name][0] if name in self._values else function
            if _path(other) != _path(function):
                raise DloError(
                    f"{self.what} names must be unique, got '{name}' in {_path(other)} and in {_path(function)}; rename"
                    " one"
                )
            made: Any = function if self._make is None else self._make(function, **options)
            self._values[name] = function, made
            registering_modules.add(function.__module__)
            return function

        return add

    def names(self) -> list[str]:
        """Returns the names in the set: registered ones first, then those of installed packages."""
        return list(dict.fromkeys([*self._values, *sorted(installed_points().select(group=self.group).names)]))

    def loaded(self) -> dict[str, Value]:
        """Returns the values whose modules are imported, by name."""
        return {name: value for name, (_, value) in self._values.items()}

    def get(self, name: str) -> Value:
        """Returns the value of a name; imports its module if an installed package has it.

        Raises:
            DloError: If the set has no such name, or the module cannot be imported.
        """
        points = installed_points().select(group=self.group, name=name) if name not in self._values else ()
        for point in points:
            function = load_function(point, self.what)
            if name not in self._values:  # The module may have registered it.
                self.register(name)(function)
        if name not in self._values:
            names = self.names()
            raise DloError(f"unknown {self.what} '{name}'{unknown_hint(name, names)}")
        return self._values[name][1]


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
