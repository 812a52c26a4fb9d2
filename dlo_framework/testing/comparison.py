"""Result of a comparison of two runs: pairs of values, differences, limits and the verdict, as data and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Pair:
    """Values of one number of a step in both runs.

    Attributes:
        one: Value in the one process.
        ranks: Value on the ranks; where ranks disagree, the value that is farthest from ``one``.
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
    """Comparison of one optimizer step.

    Attributes:
        step: Number of the step, from 0.
        loss: Losses; None where a run has none.
        norm: Gradient norms before clipping; None where a run's is not known.
    """

    step: int
    loss: Pair | None
    norm: Pair | None

    @property
    def ok(self) -> bool:
        """Whether loss and norm are within their limits."""
        return all(pair.ok for _, pair in self.pairs)

    @property
    def pairs(self) -> list[tuple[str, Pair]]:
        """Pairs of the step that are known, with their titles, in the order in which a step computes them."""
        found = (("loss", self.loss), ("gradient norm", self.norm))
        return [(title, pair) for title, pair in found if pair is not None]


@dataclass(frozen=True)
class TensorPair:
    """Difference of one tensor at the end of both runs.

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
        """Difference in units of its limit."""
        return self.difference / self.limit


@dataclass
class Comparison:
    """Comparison of a run on several ranks with the run of one process.

    Attributes:
        name: Name of the case.
        rtol: Relative difference that is allowed for losses, norms and metrics.
        rows: Optimizer steps.
        tensors: Weights by name, and optimizer state by ``"<key> of <name>"``, at the end.
        validation: Metrics of the validation at the end, by name.
        spread: 2-norm of all weights' differences relative to that of the weights; None without weights.
        control: Largest differences of loss and norm from another order of the samples in one process; None where no
            control was run.
        complete: Whether both runs took the same number of steps.
        untrained: Evidence that the runs did not train, so that they prove nothing; None where they did train.
        without_gradient: Number of elements, by name, left out because their gradient is zero up to rounding.
        double: Comparison of the same runs in double precision; None where there was none.
        double_refusal: Reason why a comparison in double precision was needed and not possible; None elsewhere.
        decided: Verdict of further runs, which overrules this comparison's own; None where its own counts.
        notes: Notes on randomness that was switched off or made equal.
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
    double_refusal: str | None = None
    decided: bool | None = None
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def within(self) -> bool:
        """Whether all differences are within their limits, and there was something to compare."""
        pairs: list[Any] = [*self.rows, *self.tensors.values(), *self.validation.values()]
        return self.comparable and all(pair.ok for pair in pairs)

    @property
    def comparable(self) -> bool:
        """Whether both runs trained, for the same number of steps."""
        measured = bool(self.rows) and any(row.loss is not None or row.norm is not None for row in self.rows)
        return measured and self.complete and self.untrained is None

    @property
    def ok(self) -> bool:
        """Whether the runs agree: the verdict."""
        return self.within if self.decided is None else self.decided

    @property
    def culprits(self) -> list[str]:
        """Names of the tensors that are out of their limits, largest excess first."""
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
    """Returns a comparison as data for JSON; numbers that are not finite become strings."""

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


# --- text ------------------------------------------------------------------------------------------------------

#: Most tensors that a report names.
_SHOWN_TENSORS = 8


def report(comparison: Comparison, steps: bool = True) -> str:
    """Returns a comparison as text.

    Args:
        comparison: Comparison to report.
        steps: Whether to include the table of all steps.
    """
    lines = [f"made equal or switched off: {note}" for note in comparison.notes]
    if steps:
        lines += ["", *table(comparison)]
    lines += ["", *summary(comparison)]
    return "\n".join(lines).strip("\n")


def table(comparison: Comparison) -> list[str]:
    """Returns the steps as lines of a table; the line of a step out of its limits ends in ``<``."""
    head = f"{'step':>5}  {'loss, 1 process':>16}  {'loss, ranks':>16}  {'diff':>7}"
    lines = [head + f"  {'grad norm, 1':>14}  {'ranks':>14}  {'diff':>7}"]
    for row in comparison.rows:
        text = f"{row.step:>5}  {_numbers(row.loss, 16)}  {_numbers(row.norm, 14)}"
        lines.append(text if row.ok else f"{text}  <")
    return lines


def _numbers(pair: Pair | None, width: int) -> str:
    if pair is None:
        return f"{'-':>{width}}  {'-':>{width}}  {'-':>7}"
    return f"{pair.one:>{width}.8g}  {pair.ranks:>{width}.8g}  {pair.difference:>7.1e}"


def summary(comparison: Comparison) -> list[str]:
    """Returns the largest differences, the verdict and the hints."""
    lines = _differences(comparison)
    if comparison.double is not None:
        lines += ["", "in double precision:", *(f"  {line}" for line in _differences(comparison.double)), ""]
    if comparison.double_refusal is not None:
        lines.append(f"in double precision: not compared ({comparison.double_refusal}); other rounding decides")
    if comparison.control is not None:
        lines.append(
            f"other rounding alone changes one process by: loss {comparison.control[0]:.1e}, gradient norm"
            f" {comparison.control[1]:.1e}"
        )
    lines.append(_verdict(comparison))
    return lines + [f"{'note' if comparison.ok else 'likely'}: {hint}" for hint in comparison.hints]


def _differences(comparison: Comparison) -> list[str]:
    """Returns lines on the largest differences, with the tensors that are out of their limits first."""
    lines = []
    for what, title in (("loss", "loss"), ("norm", "gradient norm")):
        worst = comparison.worst(what)
        if worst is None:
            lines.append(f"{title}: not compared, because a run did not record it")
            continue
        step, pair = worst
        lines.append(
            f"{title}: largest difference {pair.difference:.1e} at step {step}"
            f" ({pair.one:.8g} in one process, {pair.ranks:.8g} on the ranks)"
        )
    for name, pair in comparison.validation.items():
        lines.append(
            f"{name} at the end: difference {pair.difference:.1e}"
            f" ({pair.one:.8g} in one process, {pair.ranks:.8g} on the ranks){'' if pair.ok else '  <'}"
        )
    if comparison.spread is not None:
        lines.append(f"weights at the end: difference {comparison.spread:.1e} of their norm")
    broken = comparison.culprits
    for name in broken[:_SHOWN_TENSORS]:
        tensor = comparison.tensors[name]
        lines.append(f"  {name}: difference {tensor.difference:.1e} of its change, allowed {tensor.limit:.1e}  <")
    if len(broken) > _SHOWN_TENSORS:
        lines.append(f"  and {len(broken) - _SHOWN_TENSORS} more tensors")
    if not broken and comparison.tensors:
        name = max(comparison.tensors, key=lambda name: comparison.tensors[name].difference)
        tensor = comparison.tensors[name]
        if tensor.difference:
            lines.append(f"  most in {name}: {tensor.difference:.1e} of its change, allowed {tensor.limit:.1e}")
    if comparison.without_gradient:
        count = sum(comparison.without_gradient.values())
        names = list(comparison.without_gradient)
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"left out: {count} elements whose gradient is zero up to rounding, in {names[0]}{others}")
    return lines


def _verdict(comparison: Comparison) -> str:
    steps = f"{len(comparison.rows)} steps"
    if comparison.ok:
        pairs = [pair for row in comparison.rows for pair in (row.loss, row.norm) if pair is not None]
        strict = all(pair.difference <= comparison.rtol for pair in pairs)
        within = f"within {comparison.rtol:g}" if strict else "within rounding"
        double = f", in double precision within {comparison.double.rtol:g}" if comparison.double is not None else ""
        return f"PARITY: {comparison.name}: {steps} {within}{double}"
    if comparison.untrained is not None:
        return f"NO PARITY: {comparison.name}: nothing was trained: {comparison.untrained}"
    in_double = comparison.double is not None and not comparison.double.within
    shown = comparison.double if comparison.double is not None and in_double else comparison
    broken = next((row.step for row in shown.rows if not row.ok), None)
    metrics = [name for name, pair in shown.validation.items() if not pair.ok]
    where = f"from step {broken} on" if broken is not None else "in the final weights or optimizer state"
    if broken is None and not shown.culprits and metrics:
        where = f"in validation ({', '.join(metrics)})"
    precision = ", in double precision too" if in_double else ""
    if comparison.double is not None and not in_double:
        precision = ", in single precision only, with another seed too"
    return f"NO PARITY: {comparison.name}: differs {where}{precision}"
