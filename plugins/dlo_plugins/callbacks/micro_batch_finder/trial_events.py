"""Events that a trial process reports to the rank that has started it, as lines of JSON in a file.

A file, because it holds what a process has written before a signal ended it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Environment variable with the :class:`TrialOrder` of a trial process.
ORDER = "DLO_MICRO_BATCH_TRIAL"


@dataclass(frozen=True)
class TrialOrder:
    """What a trial process gets from the rank that has started it.

    Attributes:
        events: File of its events.
        known: Outcomes of sizes that earlier processes have tried.
        parent: Process id of the rank.
    """

    events: str
    known: Mapping[int, bool]
    parent: int

    def to_text(self) -> str:
        """Returns it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> TrialOrder:
        """Returns it from JSON, whose keys are texts."""
        values = json.loads(text)
        return cls(**(values | {"known": {int(size): fits for size, fits in values["known"].items()}}))


def write_event(path: str | Path, kind: str, **values: Any) -> None:
    """Appends an event to a file.

    Args:
        path: File.
        kind: Name: `begin` (``present`` and ``limit`` in samples), `try` (``size``), `fits` (``size``,
            ``peak_bytes``), `out_of_memory`, or `done` (``found``).
        values: Values of the event.
    """
    with open(path, "a") as file:
        file.write(json.dumps({"kind": kind, **values}) + "\n")


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """Returns the events in a file; a line that is not complete is left out."""
    try:
        lines = Path(path).read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]
