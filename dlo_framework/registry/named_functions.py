"""Sets of functions that a config names and that packages and users add to, such as suggestions of a learning rate.

The package that has a set defines it, and registers its own functions::

    SUGGESTIONS: NamedFunctions[Suggest] = NamedFunctions("suggestion", "dlo_framework.lr_suggestions")

    @SUGGESTIONS.register("valley")
    def valley(rates, losses): ...

A user's file under ``plugins:`` registers in the same way. An installed package adds an entry point in the set's group,
``valley = package.module:valley``, and is imported when a config names the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dlo_framework.errors import DloError, did_you_mean, unknown_hint
from dlo_framework.extensions import installed_points, load_function

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
        self._functions: dict[str, Callable[..., Any]] = {}
        self._values: dict[str, Value] = {}

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
            other = self._functions.get(name)
            if other is not None and _path(other) != _path(function):
                raise DloError(
                    f"{self.what} names must be unique, got '{name}' in {_path(other)} and in {_path(function)}; rename"
                    " one"
                )
            made: Any = function if self._make is None else self._make(function, **options)
            self._functions[name], self._values[name] = function, made
            registering_modules.add(function.__module__)
            return function

        return add

    def names(self) -> list[str]:
        """Returns the names in the set: registered ones first, then those of installed packages."""
        return list(dict.fromkeys([*self._values, *sorted(installed_points().select(group=self.group).names)]))

    def loaded(self) -> dict[str, Value]:
        """Returns the values whose modules are imported, by name."""
        return dict(self._values)

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
        return self._values[name]


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
