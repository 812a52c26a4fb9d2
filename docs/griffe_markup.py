"""Lets docstrings hold a little reStructuredText: the pages made from them are Markdown. Shows defaults as numbers."""

from __future__ import annotations

from typing import Any

import griffe
from markup import to_markdown  # Beside this file; hooks.py, which mkdocs loads first, has imported it.


class Markup(griffe.Extension):
    """Converts every docstring before it is parsed, and shows the numbers of constants that are defaults."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute of a package that has been loaded."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
        for parameter in obj.parameters if isinstance(obj, griffe.Function) else ():
            if isinstance(parameter.default, griffe.ExprName):
                parameter.default = _number(parameter.default, obj)


def _number(name: griffe.ExprName, function: griffe.Function) -> griffe.ExprName | str:
    """Returns the number of a constant; of any other object its name."""
    try:
        value = str(function.modules_collection[name.canonical_path].value)
        float(value)
    except (AttributeError, KeyError, ValueError, griffe.AliasResolutionError):
        return name
    return value
