"""Comparison of two recorded runs: differences of losses, norms, metrics and tensors, limits, and likely causes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import shown_names
from dlo_framework.testing.record import COPY, SQUARES, Record


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
        titled = (("loss", self.loss), ("gradient norm", self.norm))
        return [(title, pair) for title, pair in titled if pair is not None]


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


# --- comparison of two records ----------------------------------------------------------------------------

#: Factor on the controls' differences up to which a difference is allowed: both are maxima of rounding errors.
CONTROL_FACTOR = 10.0
#: Fraction of the largest loss or norm that is the smallest scale of a relative difference: a loss that has become 0
#: has no digits left to agree in. The same holds for tensors that moved less than this fraction of the others' change,
#: or of their own norm.
FLOOR = 1e-3
#: Relative differences allowed by default: five digits of single precision's seven, and the spacing of the numbers in
#: half precisions, in which each rank's gradients are rounded before they are averaged.
RTOL, RTOL_FP16, RTOL_BF16 = 1e-5, 2.0**-10, 2.0**-7
#: Factors on these for tensors. A tensor's difference is relative to how far the tensor moved, about a thousandth of
#: its size, for which single precision leaves few digits, and half precision fewer.
TENSOR_FACTOR, TENSOR_FACTOR_HALF = 10.0, 50.0
#: Differences allowed in double precision, of numbers and of tensors: far above its rounding (1e-12), and far below the
#: effect of any fault.
RTOL_DOUBLE, TENSORS_DOUBLE = 1e-7, 1e-5
#: Difference, in typical changes of an element by the run, up to which elements of no gradient are left out: Adam moves
#: them as far as others, and in two runs at most in opposite directions.
NOISE_STEPS = 8.0
#: Number of spacings, at the size of the run's gradients, below which a gradient is zero up to rounding.
ZERO_GRADIENT = 64.0


def default_rtol(precision: Any) -> float:
    """Returns the relative difference that is allowed under Lightning's ``precision``."""
    name = str(precision)
    return RTOL_BF16 if name.startswith("bf16") else RTOL_FP16 if name.startswith("16") else RTOL


def _between_norms(one: float, other: float, floor: float) -> float:
    """As :func:`relative`, but norms that overflow in both runs agree, as in the first steps of a loss scale."""
    overflow = not math.isfinite(one) and not math.isfinite(other)
    return 0.0 if overflow else relative(one, other, floor)


def compare(
    name: str,
    one: Record,
    ranks: Record,
    *,
    rtol: float = RTOL,
    tensor_rtol: float | None = None,
    controls: Sequence[Record] = (),
    factor: float = CONTROL_FACTOR,
) -> Comparison:
    """Compares a run on several ranks with the run of one process.

    Args:
        name: Name of the case.
        one: Record of the one process.
        ranks: Record of all ranks; see :func:`dlo_framework.testing.record.merge_records`.
        rtol: Relative difference to allow for losses, norms and metrics.
        tensor_rtol: Relative difference to allow for tensors; None for ten times ``rtol``, in half precision fifty.
        controls: Records of the one process with other rounding, from another order of the samples in each batch.
            Their differences, times ``factor``, are allowed too.
        factor: Factor on the controls' differences.
    """
    losses = _limits(one, controls, lambda step: step.loss, rtol, factor)
    norms = _limits(one, controls, _norm, rtol, factor)
    floors = [FLOOR * _largest(values) for values in ([s.loss for s in one.steps], [_norm(s) for s in one.steps])]
    rows = []
    for number, (mine, theirs) in enumerate(zip(one.steps, ranks.steps, strict=False)):
        loss = norm = None
        if mine.loss is not None and theirs.loss is not None:
            difference = relative(mine.loss, theirs.loss, floors[0])
            loss = Pair(mine.loss, theirs.loss, difference, losses[number])
        if mine.norms and theirs.norms:
            difference, farthest = max((_between_norms(mine.norms[0], norm, floors[1]), norm) for norm in theirs.norms)
            norm = Pair(mine.norms[0], farthest, difference, norms[number])
        rows.append(Row(number, loss, norm))
    usual = (TENSOR_FACTOR if rtol < RTOL_FP16 else TENSOR_FACTOR_HALF) * rtol
    allowed = usual if tensor_rtol is None else tensor_rtol
    noise = without_gradient(one, [ranks, *controls])
    rounding = [tensor_differences(one, control, noise) for control in controls]
    tensors = {
        key: TensorPair(difference, max(allowed, factor * _most(other.get(key, 0.0) for other in rounding)))
        for key, difference in tensor_differences(one, ranks, noise).items()
    }
    comparison = Comparison(
        name=name,
        rtol=rtol,
        rows=rows,
        tensors=tensors,
        validation=_validation(one, ranks, controls, rtol, factor),
        spread=_spread(one.weights, ranks.weights),
        control=_control(one, controls) if controls else None,
        complete=len(one.steps) == len(ranks.steps),
        untrained=untrained(one) or untrained(ranks),
        without_gradient={name: int(mask.sum()) for name, mask in noise.items()},
        notes=list(dict.fromkeys([*one.notes, *ranks.notes])),
    )
    comparison.hints = hints(comparison, one, ranks)
    return comparison


def untrained(record: Record) -> str | None:
    """Returns the evidence that a run did not train, so that it proves nothing; None if it did train.

    A strategy that loses all gradients would agree with one process that has none.
    """
    norms = [norm for step in record.steps for norm in step.norms]
    losses = [step.loss for step in record.steps if step.loss is not None]
    if norms and not any(norms):
        return "every gradient is zero"
    if len(losses) > 1 and len(set(losses)) == 1:
        return f"the loss stays {losses[0]:.8g} for {len(losses)} steps"
    if len(record.steps) > 1 and record.moved and not any(record.moved.values()):
        return f"no weight has moved in {len(record.steps)} steps"
    return None


# --- losses, norms, metrics ------------------------------------------------------------------------------------


def _limits(one: Record, controls: Sequence[Record], value: Any, rtol: float, factor: float) -> list[float]:
    """Returns each step's limit; limits never fall, because rounding errors accumulate over the steps."""
    mine = [value(step) for step in one.steps]
    floor, largest, limits = FLOOR * _largest(mine), 0.0, []
    for number, of_one in enumerate(mine):
        others = [value(control.steps[number]) for control in controls if number < len(control.steps)]
        largest = max(largest, _most(relative(of_one, other, floor) for other in others if None not in (of_one, other)))
        limits.append(max(rtol, factor * largest))
    return limits


def _most(values: Iterable[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0)


def _control(one: Record, controls: Sequence[Record]) -> tuple[float, float]:
    losses, norms = (_limits(one, controls, value, 0.0, 1.0) for value in (lambda step: step.loss, _norm))
    return max(losses, default=0.0), max(norms, default=0.0)


def _validation(one: Record, ranks: Record, controls: Sequence[Record], rtol: float, factor: float) -> dict[str, Pair]:
    """Returns the metrics of both runs; the difference is infinite where a run does not have a metric.

    Lightning (2.6) keeps metrics in float32 whatever the precision of the run.
    """
    pairs, rtol = {}, max(rtol, RTOL)
    for name in dict.fromkeys([*one.validation, *ranks.validation]):
        mine, theirs = one.validation.get(name, ()), ranks.validation.get(name, ())
        if not mine or not theirs:
            value = (mine or theirs)[0]
            pairs[name] = Pair(value if mine else math.nan, value if theirs else math.nan, math.inf, rtol)
            continue
        difference, farthest = max((_metric_difference(mine[0], value), value) for value in theirs)
        rounding = _most(_metric_difference(mine[0], c.validation[name][0]) for c in controls if name in c.validation)
        pairs[name] = Pair(mine[0], farthest, difference, max(rtol, factor * rounding))
    return pairs


def _metric_difference(one: float, other: float) -> float:
    both_nan = math.isnan(one) and math.isnan(other)
    return 0.0 if both_nan or one == other else relative(one, other, 0.0)


def _norm(step: Any) -> float | None:
    return step.norms[0] if step.norms else None


def _largest(values: list[float | None]) -> float:
    return max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)


# --- tensors ---------------------------------------------------------------------------------------------------


def tensor_differences(one: Record, other: Record, noise: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the relative differences of weights and optimizer state by name; infinite where a run lacks a weight.

    For a weight it is the 2-norm of the difference, relative to how far training moved the tensor: relative to its
    size, a wrong gradient would not show in a short run. Optimizer state that only one run has is left out, because
    strategies may keep their own.

    Args:
        one: Record of the one process.
        other: Record to compare.
        noise: Masks of elements to leave out where their difference is one that rounding can make, by the weight's
            name.
    """
    moved = _typical(one.moved, one.weights)
    differences = {}
    for name in dict.fromkeys([*one.weights, *other.weights]):
        mine, theirs = one.weights.get(name), other.weights.get(name)
        if mine is None or theirs is None:
            differences[name] = math.inf
            continue
        scale = max(one.moved.get(name, 0.0), FLOOR * moved * mine.numel() ** 0.5, FLOOR * _norm_of(mine))
        step = max(moved, one.moved.get(name, 0.0) / max(1, mine.numel()) ** 0.5)
        differences[name] = _difference(mine, theirs, scale, noise.get(name), NOISE_STEPS * step)
    sizes = {name: _norm_of(value) for name, value in one.optimizer.items()}
    for key in dict.fromkeys(name.partition(" of ")[0] for name in one.optimizer):
        of_key = {name: value for name, value in one.optimizer.items() if name.startswith(f"{key} of ")}
        typical = _typical({name: sizes[name] for name in of_key}, of_key)
        for name, mine in of_key.items():
            scale = max(sizes[name], FLOOR * typical * mine.numel() ** 0.5)
            for held in (name, name + COPY):
                if held in other.optimizer:
                    differences[held] = _difference(mine, other.optimizer[held], scale)
    return differences


def without_gradient(one: Record, others: Sequence[Record]) -> dict[str, Tensor]:
    """Returns masks of the elements whose gradient is zero up to rounding in every run, by the weight's name.

    The bias of attention's keys shifts all scores of a query equally, and softmax is invariant to the shift. Adam
    scales the rounding errors in such a gradient up to full steps. The elements are found by Adam's running mean of
    squared gradients.
    """
    squares = {
        name.removeprefix(f"{SQUARES} of "): value
        for name, value in one.optimizer.items()
        if name.startswith(f"{SQUARES} of ")
    }
    squares = {name: value for name, value in squares.items() if name in one.weights}
    count = sum(value.numel() for value in squares.values())
    if not count:
        return {}
    typical = sum(float(value.double().sum()) for value in squares.values()) / count
    masks = {}
    for name, value in squares.items():
        weight = one.weights[name]
        if not weight.is_floating_point() or value.shape != weight.shape:
            continue
        limit = (ZERO_GRADIENT * torch.finfo(weight.dtype).eps) ** 2 * typical
        mask = (value <= limit) & (value > 0)
        for other in others:
            theirs = other.optimizer.get(f"{SQUARES} of {name}")
            mask &= (theirs <= limit) if theirs is not None and theirs.shape == mask.shape else False
        if mask.any():
            masks[name] = mask
    return masks


def _difference(one: Tensor, other: Tensor, scale: float, leave_out: Tensor | None = None, most: float = 0.0) -> float:
    """Returns a difference's 2-norm, relative to a scale, without elements to leave out of `most` or less."""
    if one.shape != other.shape:
        return math.inf
    error = one.double() - other.double()
    if leave_out is not None:
        error = error.masked_fill(leave_out & (error.abs() <= most), 0.0)
    size = _norm_of(error)
    return 0.0 if size == 0 else size / scale if scale and math.isfinite(size) else math.inf


def _typical(sizes: Mapping[str, float], tensors: Mapping[str, Tensor]) -> float:
    """Returns the root mean square of all elements of the tensors that are not zero, from their 2-norms."""
    known = {name: size for name, size in sizes.items() if size and name in tensors and math.isfinite(size)}
    count = sum(tensors[name].numel() for name in known)
    return (sum(size**2 for size in known.values()) / count) ** 0.5 if count else 0.0


def _norm_of(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double())) if tensor.numel() else 0.0


def _spread(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float | None:
    shared = [name for name in one if name in other and one[name].shape == other[name].shape]
    shared = [name for name in shared if one[name].is_floating_point()]
    size = sum(_norm_of(one[name]) ** 2 for name in shared) ** 0.5
    if not shared or not size:
        return None
    return sum(_norm_of(one[name].double() - other[name].double()) ** 2 for name in shared) ** 0.5 / size


# --- likely causes ---------------------------------------------------------------------------------------------

#: Relative change of losses by rounding above which little is left to compare.
_CHAOTIC = 1e-3


def hints(comparison: Comparison, one: Record, ranks: Record) -> list[str]:
    """Returns what differs first and the likely causes, the most certain first; no cause without a difference."""
    causes = _causes(comparison, one, ranks)
    if comparison.within or not comparison.rows or comparison.untrained is not None:
        return causes
    group = first_group(one, ranks)
    return [*first_difference(comparison), *([f"after the first step, {group} differ"] if group else []), *causes]


def first_difference(comparison: Comparison) -> list[str]:
    """Returns a line about the first quantity that is out of its limit: of a step, or a tensor at the end."""
    pairs = ((f"{what} of step {row.step}", pair) for row in comparison.rows for what, pair in row.pairs if not pair.ok)
    what, pair = next(pairs, (None, None))
    names = comparison.culprits
    tensor = f"'{names[0]}' ({comparison.tensors[names[0]].difference:.1e} of its change)" if names else ""
    if pair is None:
        return [f"the first difference is in {tensor} at the end"] if names else []
    most = f"; at the end {tensor} differs most" if names else ""
    return [f"the first difference is the {what}: {pair.one:.8g} in one process, {pair.ranks:.8g} on the ranks{most}"]


#: Difference of outlines, relative to a typical change of as many elements, above which a first step is another one.
_OTHER_STEP = 1e-2


def first_group(one: Record, ranks: Record) -> str:
    """Returns which parameters the first step has changed otherwise on the ranks; empty if none are known.

    A group says more than names: a kind of module, what one rank steps, or a run of parameters, as one bucket has.
    """
    names = [name for name, change in one.first.items() if name in ranks.first and change.isfinite().all()]
    total = float(torch.stack([one.first[name][0] for name in names]).norm()) if names else 0.0
    typical = total / max(1, sum(one.weights[name].numel() for name in names)) ** 0.5
    apart = [
        name
        for name in names
        if not (one.first[name] - ranks.first[name]).abs().max()
        <= _OTHER_STEP * max(float(one.first[name][0].max()), typical * (one.weights[name].numel() / 8) ** 0.5)
    ]
    if len(apart) in (0, len(names)):
        return f"all {len(names)} parameters" if apart else ""
    kinds = {one.kinds.get(name) for name in apart}
    if len(kinds) == 1 and apart == [name for name in names if one.kinds.get(name) in kinds]:
        return f"all parameters of {kinds.pop()} modules"
    for rank, own in enumerate(ranks.stepped):
        others = set().union(*(stepped for other, stepped in enumerate(ranks.stepped) if other != rank))
        if own - others and (own - others).intersection(names) <= set(apart) <= own:
            return f"the parameters that rank {rank} steps"
    first, last = names.index(apart[0]), names.index(apart[-1])
    if 1 < len(apart) == last - first + 1:
        return f"the {len(apart)} parameters from {apart[0]} to {apart[-1]}, a run as a bucket or a stage has it,"
    return shown_names(apart)


def _causes(comparison: Comparison, one: Record, ranks: Record) -> list[str]:
    causes = []
    rows = comparison.rows
    if comparison.control is not None and comparison.control[0] > _CHAOTIC:
        causes.append(
            f"rounding alone changes the losses of one process by up to {comparison.control[0]:.0e}, so that the last"
            " steps prove little: compare fewer steps, at a lower learning rate, or with --trainer.precision 64-true"
        )
    if comparison.within:
        return causes
    if not rows:
        return ["no step was compared: the runs made no optimizer step"]
    if comparison.untrained is not None:
        return [
            f"nothing was trained: {comparison.untrained}. A model that does not learn agrees with any other that does"
            " not; check the learning rate, the optimizer's parameters and the loss that training_step returns"
        ]
    if len(one.steps) != len(ranks.steps):
        causes.append(f"one process made {len(one.steps)} steps and the ranks {len(ranks.steps)}: their data differ")
    apart = next(
        (i for i, (a, b) in enumerate(zip(one.steps, ranks.steps, strict=False)) if a.digest != b.digest), None
    )
    if apart is not None:
        sizes = f"{one.steps[apart].samples} samples in one process, {ranks.steps[apart].samples} on the ranks"
        causes.append(
            f"the batches of step {apart} are not the same ({sizes}): the ranks see other data than one process, or"
            " augment or mix it with their own random numbers"
        )
    if one.initial != ranks.initial:
        names = [name for name in one.initial if one.initial[name] != ranks.initial.get(name)]
        causes.append(f"the weights differ before the first step, {len(names)} tensors: {', '.join(names[:3])} ...")
    drew = [record.drew for record in (one, ranks) if record.drew is not None]
    if drew:
        causes.append(
            f"training_step draws random numbers (first at step {min(drew)}), different ones on each rank, and not for"
            " a known dropout module: switch it off"
        )
    if ranks.batch_norms:
        causes.append(
            f"BatchNorm statistics are per rank ({ranks.batch_norms} layers): use sync_batchnorm: true in the trainer"
            " (on accelerators), or a norm within each sample, such as GroupNorm"
        )
    first = rows[0].loss
    size = max(1, ranks.place[1])
    if first is not None and size > 1 and relative(first.one, size * first.ranks, 0.0) < 1e-3:
        causes.append(
            f"the loss of one process is {size} times that of {size} ranks: a sum over the batch. Strategies average"
            " gradients over ranks, so return the mean"
        )
    if not all(math.isfinite(pair.one) for row in rows for pair in (row.loss, row.norm) if pair is not None):
        causes.append("losses or gradients are not finite in one process either: the recipe itself diverges")
    trained_alike = all(row.ok for row in rows) and all(pair.ok for pair in comparison.tensors.values())
    if trained_alike and not causes:
        return [
            "training agrees, validation does not: ranks see other samples than one process (a padded last batch, a"
            " sampler), or each logs its own value: log with sync_dist=True, and weigh means by their number of samples"
        ]
    if rows[0].ok and not causes:
        causes.append(
            "the first step's loss and gradients agree: the cause comes after them, in the optimizer's step, clipping"
            " or the exchange of weights"
        )
    return causes or ["the first step differs already: check the forward pass, the loss's mean, the gradients' average"]
