"""Commands that need shapes alone, such as ``dlo plan``: what their machine lacks is noted, where a run would fail."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

from dlo_framework.errors import MissingInput

#: What the running command has missed, in order; None in a run, which needs everything.
_MISSED: ContextVar[dict[str, None] | None] = ContextVar("missed", default=None)


@contextlib.contextmanager
def config_only(command: str) -> Iterator[None]:
    """Inside, data, weights and tokenizers may be missing; what was missed is printed at the end, in one line.

    Args:
        command: Words that call the command, for that line.
    """
    missed: dict[str, None] = {}
    token = _MISSED.set(missed)
    try:
        yield
    finally:
        _MISSED.reset(token)
    if missed:
        words = ", ".join(missed)
        print(f"{command}: shapes come from the config alone; missing here, and not read: {words}", file=sys.stderr)


def note_missing(what: str) -> bool:
    """Notes what is missing, and returns whether the command can do without it; False in a run."""
    missed = _MISSED.get()
    if missed is None:
        return False
    missed[what] = None
    return True


@contextlib.contextmanager
def skip_missing() -> Iterator[None]:
    """Inside, an input that is missing ends the block, and is noted, in a command that can do without it."""
    try:
        yield
    except (MissingInput, FileNotFoundError) as error:
        what = error.what if isinstance(error, MissingInput) else error.filename or error
        if not note_missing(str(what)):
            raise
