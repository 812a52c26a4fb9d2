"""Two records of a training side by side: differences, and what is too much."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from dlo_framework.testing.comparison import Comparison, Pair, Row, relative
from dlo_framework.testing.hints import hints
from dlo_framework.testing.record import Record

#: How much larger than the control's a difference may be. Both are maxima of rounding errors, which vary.
CONTROL_FACTOR = 10.0
#: Losses and norms below this fraction of the largest are measured against that: a loss that has become 0 has no
#: digits left to agree in.
FLOOR = 1e-3
#: The relative difference that is allowed by default: five digits of single precision's seven, and the spacing of the
#: numbers of half precisions, in which each rank's gradients are rounded before they are averaged.
RTOL, RTOL_FP16, RTOL_BF16 = 1e-5, 2.0**-10, 2.0**-7


def default_rtol(precision: Any) -> float:
    """Returns the relative difference to allow under Lightning's ``precision``."""
    name = str(precision)
    return RTOL_BF16 if name.startswith("bf16") else RTOL_FP16 if name.startswith("16") else RTOL


def _between_norms(one: float, other: float, floor: float) -> float:
    """As :func:`relative`; but gradients that overflow in both runs agree: a loss scale's first steps are like that."""
    overflow = not math.isfinite(one) and not math.isfinite(other)
    return 0.0 if overflow else relative(one, other, floor)


def compare(name: str, one: Record, ranks: Record, *, rtol: float = RTOL, control: Record | None = None) -> Comparison:
    """Returns the comparison of a run on ranks with the run of one process.

    Args:
        name: of the case.
        one: the run of one process.
        ranks: that of all ranks; see :func:`dlo_framework.testing.record.merge`.
        rtol: how much losses, norms and weights may differ, relatively.
        control: the one process again, with the samples of each batch in the opposite order. Where that alone
            changes something by more than a tenth of ``rtol``, ten times that is allowed. It says nothing where
            ``training_step`` draws random numbers, which then meet other samples.
    """
    if one.drew is not None:
        control = None
    losses = _limits([s.loss for s in one.steps], [s.loss for s in control.steps] if control else None, rtol)
    norms = _limits(
        [_first(s.norms) for s in one.steps], [_first(s.norms) for s in control.steps] if control else None, rtol
    )
    floors = [
        FLOOR * _largest(values) for values in ([s.loss for s in one.steps], [_first(s.norms) for s in one.steps])
    ]
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
    differences = weight_differences(one.weights, ranks.weights)
    rounding = weight_differences(one.weights, control.weights) if control else {}
    comparison = Comparison(
        name=name,
        rtol=rtol,
        rows=rows,
        weights=differences,
        weight_limits={key: max(rtol, CONTROL_FACTOR * rounding.get(key, 0.0)) for key in differences},
        spread=_spread(one.weights, ranks.weights),
        control=_control(one, control) if control else None,
        complete=len(one.steps) == len(ranks.steps),
        notes=list(dict.fromkeys([*one.notes, *ranks.notes])),
    )
    comparison.hints = hints(comparison, one, ranks)
    return comparison


def _limits(one: list[float | None], control: list[float | None] | None, rtol: float) -> list[float]:
    """Returns each step's limit: rounding errors that a run has made stay in it, so limits never fall."""
    limits, floor, largest = [], FLOOR * _largest(one), 0.0
    for number, value in enumerate(one):
        other = control[number] if control is not None and number < len(control) else None
        if value is not None and other is not None:
            difference = relative(value, other, floor)
            largest = max(largest, difference if math.isfinite(difference) else 0.0)
        limits.append(max(rtol, CONTROL_FACTOR * largest))
    return limits


def _control(one: Record, control: Record) -> tuple[float, float]:
    found = []
    for mine, theirs in (
        ([s.loss for s in one.steps], [s.loss for s in control.steps]),
        ([_first(s.norms) for s in one.steps], [_first(s.norms) for s in control.steps]),
    ):
        floor = FLOOR * _largest(mine)
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=False) if a is not None and b is not None]
        found.append(max((relative(a, b, floor) for a, b in pairs), default=0.0))
    return found[0], found[1]


def _first(values: tuple[float, ...]) -> float | None:
    return values[0] if values else None


def _largest(values: list[float | None]) -> float:
    return max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)


def weight_differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Returns each tensor's largest difference relative to its largest element; infinite where a side lacks it."""
    differences = {}
    for name in dict.fromkeys([*one, *other]):
        mine, theirs = one.get(name), other.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            differences[name] = math.inf
        elif not mine.numel():
            differences[name] = 0.0
        else:
            error = float((mine.double() - theirs.double()).abs().max())
            scale = float(mine.double().abs().max())
            differences[name] = 0.0 if error == 0 else error / scale if scale and math.isfinite(error) else math.inf
    return differences


def _spread(one: dict[str, Tensor], other: dict[str, Tensor]) -> float | None:
    shared = [name for name in one if name in other and one[name].shape == other[name].shape]
    shared = [name for name in shared if one[name].is_floating_point()]
    size = sum(float(one[name].double().pow(2).sum()) for name in shared) ** 0.5
    if not shared or not size:
        return None
    return sum(float((one[name].double() - other[name].double()).pow(2).sum()) for name in shared) ** 0.5 / size
