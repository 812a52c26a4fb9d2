"""What is found when two records of a training are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A number of one step in both runs.

    Attributes:
        one: Value in the one process.
        ranks: Value on the ranks; the one that is farthest from ``one``, where ranks disagree.
        difference: Relative difference.
        limit: Largest difference that is parity.
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
        step: Number of the step, from 0.
        loss: None where a run has none.
        norm: Norm of the gradients, before clipping; None where a run's cannot be known.
    """

    step: int
    loss: Pair | None
    norm: Pair | None

    @property
    def ok(self) -> bool:
        """Whether loss and norm are within their limits."""
        return all(pair.ok for pair in (self.loss, self.norm) if pair is not None)


@dataclass(frozen=True)
class TensorPair:
    """The difference of one tensor at the end of both runs.

    Attributes:
        difference: 2-norm of the difference, relative to how far training moved the tensor (weights) or to the
            tensor's own 2-norm (optimizer state); infinite where one run lacks the tensor.
        limit: Largest difference that is parity.
    """

    difference: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the difference is within its limit."""
        return self.difference <= self.limit

    @property
    def excess(self) -> float:
        """The difference in units of its limit."""
        return self.difference / self.limit


@dataclass
class Comparison:
    """A run on several ranks beside the run of one process.

    Attributes:
        name: Name of the case.
        rtol: Relative difference that is allowed for losses, norms and metrics.
        rows: Optimizer steps.
        tensors: Weights by name, and optimizer state by ``"<key> of <name>"``, at the end.
        validation: Metrics of the validation at the end, by name.
        spread: 2-norm of all weights' differences relative to that of the weights; None without weights.
        control: Largest differences of loss and norm that another order of the samples makes in one process; None
            where no control was run.
        complete: Whether both runs took the same number of steps.
        untrained: Why the runs prove nothing: they did not train; None where they did.
        without_gradient: Elements that were left out, since their gradient is zero but for rounding: number by name.
        double: The comparison of the same runs in double precision; None where there was none.
        alone: Why there was no comparison in double precision though one was needed; None elsewhere.
        decided: Verdict that was reached by further runs, overruling this comparison's own; None where its own counts.
        notes: What was switched off or made equal.
        hints: Likely causes of a difference.
    """

    name: str
    rtol: float
    rows: list[Row]
    tensors: dict[str, TensorPair]
    validation: dict[str, Pair]
    spread: float | None
    control: tuple[float, float] | None = None
    complete: bool = True
    untrained: str | None = None
    without_gradient: dict[str, int] = field(default_factory=dict)
    double: Comparison | None = None
    alone: str | None = None
    decided: bool | None = None
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def within(self) -> bool:
        """Whether everything is within its limits, and there was something to compare."""
        pairs: list[Any] = [*self.rows, *self.tensors.values(), *self.validation.values()]
        return self.comparable and all(pair.ok for pair in pairs)

    @property
    def comparable(self) -> bool:
        """Whether both runs trained, and as many steps."""
        measured = bool(self.rows) and any(row.loss is not None or row.norm is not None for row in self.rows)
        return measured and self.complete and self.untrained is None

    @property
    def ok(self) -> bool:
        """The verdict."""
        return self.within if self.decided is None else self.decided

    @property
    def culprits(self) -> list[str]:
        """The tensors that are out of their limits, the farthest first."""
        broken = [name for name, pair in self.tensors.items() if not pair.ok]
        return sorted(broken, key=lambda name: -self.tensors[name].excess)

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

    def plain(value: Pair | TensorPair | None) -> dict[str, Any] | None:
        return None if value is None else {key: _plain(number) for key, number in vars(value).items()}

    return {
        "name": comparison.name,
        "parity": comparison.ok,
        "rtol": comparison.rtol,
        "steps": [{"step": row.step, "loss": plain(row.loss), "grad_norm": plain(row.norm)} for row in comparison.rows],
        "validation": {name: plain(pair) for name, pair in comparison.validation.items()},
        "tensors": {name: plain(pair) for name, pair in comparison.tensors.items()},
        "culprits": comparison.culprits,
        "without_gradient": comparison.without_gradient,
        "weights_spread": _plain(comparison.spread),
        "control": None if comparison.control is None else [_plain(value) for value in comparison.control],
        "double": None if comparison.double is None else to_json(comparison.double),
        "notes": comparison.notes,
        "hints": comparison.hints,
    }


def _plain(value: float | None) -> float | str | None:
    return str(value) if value is not None and not math.isfinite(value) else value
