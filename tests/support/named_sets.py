"""Keeps the functions that a test registers from the other tests of its process."""

from __future__ import annotations

import pytest

from dlo_plugins.parallel.pipeline.pipeline_schedules import SCHEDULES
from dlo_plugins.schedules.lr_finder import SUGGESTIONS


def isolate_named_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the sets of schedules and suggestions back, as they are now, when the test ends."""
    for functions in (SCHEDULES, SUGGESTIONS):
        monkeypatch.setattr(functions, "_values", dict(functions._values))
