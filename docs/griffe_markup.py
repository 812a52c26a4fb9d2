"""Lets docstrings hold a little reStructuredText: the pages made from them are Markdown."""

from __future__ import annotations

from typing import Any

import griffe
from markup import to_markdown  # Beside this file; hooks.py, which mkdocs loads first, has imported it.


class Markup(griffe.Extension):
    """Converts every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
