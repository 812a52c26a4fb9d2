"""What is found when two records of a training are laid side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A number of one step in both runs.

    Attributes:
        one: in the one process.
        ranks: on the ranks; the value that is farthest from ``one``, where ranks disagree.
        difference: relative.
        limit: what it may be.
    """

    one: float
    ranks: float
    difference: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within its limit."""
        return self.difference <= self.limit


@dataclass(frozen=True)
class Row:
    """One optimizer step.

    Attributes:
        step: from 0.
        loss: None where a run has none.
        norm: of the gradients, before clipping; None where a run's cannot be known.
    """

    step: int
    loss: Pair | None
    norm: Pair | None

    @property
    def ok(self) -> bool:
        """Whether loss and norm are within their limits."""
        return all(pair.ok for pair in (self.loss, self.norm) if pair is not None)


@dataclass
class Comparison:
    """A run on several ranks beside the run of one process.

    Attributes:
        name: of the case.
        rtol: the relative difference that is allowed.
        rows: of the steps.
        weights: each tensor's largest difference relative to its largest element, one and other missing: infinite.
        weight_limits: what these may be.
        spread: the 2-norm of all weights' differences relative to that of the weights; None without weights.
        control: largest differences of loss and norm that turning the samples of each batch round makes in one
            process: what rounding alone does; None where that was not tried.
        complete: whether both took the same number of steps.
        notes: what was switched off or made equal.
        hints: what is likely behind a difference.
    """

    name: str
    rtol: float
    rows: list[Row]
    weights: dict[str, float]
    weight_limits: dict[str, float]
    spread: float | None
    control: tuple[float, float] | None = None
    complete: bool = True
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything is within its limits, and there was something to compare."""
        measured = bool(self.rows) and any(row.loss is not None or row.norm is not None for row in self.rows)
        spread = self.spread is None or self.spread <= self.spread_limit
        return measured and self.complete and spread and not self.broken_weights and all(row.ok for row in self.rows)

    @property
    def spread_limit(self) -> float:
        """What :attr:`spread` may be: the tolerance, or what the losses' limit has become under the control."""
        return max([self.rtol, *(row.loss.limit for row in self.rows[-1:] if row.loss is not None)])

    @property
    def broken_weights(self) -> list[str]:
        """The tensors whose difference is too large, the largest first."""
        broken = [name for name, difference in self.weights.items() if not difference <= self.weight_limits[name]]
        return sorted(broken, key=lambda name: -self.weights[name])

    def worst(self, what: str) -> tuple[int, Pair] | None:
        """Returns the step and pair of the largest difference of ``"loss"`` or ``"norm"``; None if there is none."""
        pairs: list[tuple[int, Pair]] = [(row.step, getattr(row, what)) for row in self.rows]
        pairs = [(step, pair) for step, pair in pairs if pair is not None]
        return max(pairs, key=lambda item: item[1].difference, default=None)


def relative(one: float, other: float, floor: float) -> float:
    """Returns ``|one - other|`` relative to ``|one|`` or ``floor``, the larger; infinite if one is not finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    if one == other:
        return 0.0
    scale = max(abs(one), floor)
    return abs(one - other) / scale if scale else math.inf


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as data that JSON can hold; what is not finite is a string."""

    def pair(value: Pair | None) -> dict[str, Any] | None:
        return None if value is None else {key: _plain(number) for key, number in vars(value).items()}

    return {
        "name": comparison.name,
        "parity": comparison.ok,
        "rtol": comparison.rtol,
        "steps": [{"step": row.step, "loss": pair(row.loss), "grad_norm": pair(row.norm)} for row in comparison.rows],
        "weights": {
            name: {"difference": _plain(value), "limit": _plain(comparison.weight_limits[name])}
            for name, value in comparison.weights.items()
        },
        "weights_spread": _plain(comparison.spread),
        "control": None if comparison.control is None else [_plain(value) for value in comparison.control],
        "notes": comparison.notes,
        "hints": comparison.hints,
    }


def _plain(value: float | None) -> float | str | None:
    return str(value) if value is not None and not math.isfinite(value) else value
