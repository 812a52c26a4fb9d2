"""Points of a run as a config writes them: epochs, percents of the run, or samples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from dlo_framework.data import Position
from dlo_framework.errors import DloError

Value = TypeVar("Value")

_FORM = re.compile(r"(\d+(?:[._]\d+)*(?:e\d+)?)\s*(%|epochs?|samples?)?", re.IGNORECASE)


@dataclass(frozen=True)
class Point:
    """A point of a run.

    Attributes:
        value: how many of the unit lie before it.
        unit: ``epochs``, ``runs`` (the value is then a fraction, 0 to 1) or ``samples`` of all ranks.
    """

    value: float
    unit: Literal["epochs", "runs", "samples"]

    def reached(self, at: Position, max_epochs: float) -> bool:
        """Returns whether a batch that begins at ``at`` lies at or after this point."""
        return self.distance(at, max_epochs) >= 0

    def distance(self, at: Position, max_epochs: float) -> float:
        """Returns by how much of its unit ``at`` lies after this point; negative before it."""
        if self.unit == "samples":
            return at.epoch * at.size + at.samples - self.value
        return at.epochs - self.value * (max_epochs if self.unit == "runs" else 1.0)

    def epochs(self, size: int, max_epochs: float) -> float:
        """Returns the point in epochs of ``size`` samples, in a run of ``max_epochs``."""
        return self.value * {"epochs": 1.0, "runs": max_epochs, "samples": 1 / size}[self.unit]


def parse_point(point: str | int | float, what: str) -> Point:
    """Returns the point that a config names: ``3`` or ``"3 epochs"``, ``"50%"``, ``"500_000 samples"``.

    Args:
        point: a number without a unit is of epochs.
        what: whose it is, for the message.

    Raises:
        DloError: if it is none of these forms, or a percentage above 100.
    """
    found = _FORM.fullmatch(str(point).strip())
    if found is None:
        raise DloError(f"{what}: a point is like 3, '3 epochs', '50%' or '500000 samples', but was {point!r}")
    value, unit = float(found[1].replace("_", "")), (found[2] or "epochs").lower()
    if unit == "%":
        if value > 100:
            raise DloError(f"{what}: a point lies within the run, at most '100%', but was {point!r}")
        return Point(value / 100, "runs")
    return Point(value, "samples" if unit.startswith("sample") else "epochs")


def any_percentage(points: Iterable[Point]) -> bool:
    """Returns whether any point is a part of the run."""
    return any(point.unit == "runs" for point in points)


def check_max_epochs(points: list[Point], max_epochs: int | None, what: str) -> float:
    """Returns how many epochs the run has, infinite where percentages do not ask.

    Raises:
        DloError: if a point is a percentage and ``trainer.max_epochs`` sets no end.
    """
    if max_epochs is not None and max_epochs >= 0:
        return float(max_epochs)
    if any_percentage(points):
        raise DloError(f"{what}: a percentage needs trainer.max_epochs; set it, or give epochs or samples")
    return float("inf")


def latest(steps: Mapping[Point, Value], at: Position, max_epochs: float) -> Value | None:
    """Returns the value of the last point that ``at`` has reached, in the order of the run; None before the first."""
    in_order = sorted(steps, key=lambda point: point.epochs(at.size, max_epochs))
    reached = [point for point in in_order if point.reached(at, max_epochs)]
    return steps[reached[-1]] if reached else None
