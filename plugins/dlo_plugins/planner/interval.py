"""Interval of a predicted step time: the ratios of measured to predicted times in known runs."""

from __future__ import annotations

from dataclasses import dataclass

#: Least and most ratio of published runs on GPUs and of a benchmark's runs on a CPU; see docs/plugins/plan.md.
_KNOWN = {"cuda": (0.95, 1.2, "published runs on A100 and H100"), "cpu": (0.8, 1.4, "runs of small models on a CPU")}


@dataclass(frozen=True)
class Interval:
    """Range of measured over predicted step times.

    Attributes:
        low: Least ratio.
        high: Largest ratio.
        source: Runs that it comes from.
    """

    low: float
    high: float
    source: str

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest ratio."""
        return self.low, self.high

    def __str__(self) -> str:
        return f"intervals: {self.low:.2f} to {self.high:.2f} of the predicted time, as in {self.source}"


def find_interval(device: str) -> Interval:
    """Returns the interval of known runs on a type of device, `cuda` or `cpu`."""
    return Interval(*_KNOWN[device])
