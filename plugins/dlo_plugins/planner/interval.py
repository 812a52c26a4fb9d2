"""Interval of a predicted step time: the ratios of measured to predicted times in runs that were checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Fewest checked runs whose ratios are an interval of their own.
_FEWEST = 3
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


def find_interval(folder: Path, machine: str, device: str) -> Interval:
    """Returns the interval of the runs that `dlo plan --check` has compared on a machine; else that of known runs.

    Args:
        folder: Folder that holds all runs, such as `runs`.
        machine: Name of the machine.
        device: Type of its devices, `cuda` or `cpu`.
    """
    ratios = []
    for path in sorted(folder.glob("*/version_*/plan_check.json")):
        found = _read(path)
        step = found.get("residuals", {}).get("step_seconds", {})
        if found.get("machine") == machine and step.get("measured") and step.get("predicted"):
            ratios.append(float(step["measured"]) / float(step["predicted"]))
    if len(ratios) >= _FEWEST:
        return Interval(min(ratios), max(ratios), f"{len(ratios)} checked runs in {folder} on {machine}")
    low, high, source = _KNOWN[device]
    return Interval(low, high, source)


def _read(path: Path) -> dict[str, Any]:
    """Returns a stored comparison; nothing of a file that a person has changed to something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
