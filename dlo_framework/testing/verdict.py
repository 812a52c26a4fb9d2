"""Verdict on a strategy: distinguishes a fault from rounding, by further runs where they are needed.

1. Ranks and one process train with the config's precision. If they agree within the tolerance, that is parity.
2. Else both train in double precision, where rounding is a billion times smaller: a difference there is a fault.
3. If they agree there, one process trains with other rounding, to see whether single precision explains the first
   difference. If it does not, another seed decides: a router that chooses another expert by chance does not do so
   twice, and a strategy that is wrong only in single precision is wrong with each seed.

In half precision, and where a model or strategy refuses double precision, the runs with other rounding decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from dlo_framework.testing.compare import RTOL, RTOL_DOUBLE, TENSORS_DOUBLE, compare
from dlo_framework.testing.comparison import Comparison
from dlo_framework.testing.record import Record
from dlo_framework.testing.training import Setting

#: Number of runs with other rounding: two beside double precision, and three where they decide.
_CONTROLS = 2
_CONTROLS_ALONE = 3
#: Factor on the differences from other rounding above which a difference is not rounding, if double precision agrees.
_FAR = 100.0
#: Relative difference of the first step's loss or gradient norm that rounding cannot cause; where the tolerance is that
#: of bf16, this multiple of the tolerance.
_HOPELESS, _HOPELESS_FACTOR = 1e-2, 8.0

#: Generator that yields settings and is sent their records: a string for a failed run, in double precision only.
Runs = Generator[list[Setting], list[Any], Comparison]


def verdict(name: str, setting: Setting, *, precision: Any, rtol: float, further: bool = True) -> Runs:
    """Yields the settings to train, is sent their records, and returns the comparison; see the module's docstring.

    Args:
        name: Name of the case.
        setting: Setting of the ranks. Those of one process are yielded with ``shares=0``, for the ranks' number.
        precision: Lightning's name of the runs' precision.
        rtol: Relative difference to allow for losses, norms and metrics.
        further: Whether to ask for further runs; without them, rounding counts as a fault.
    """
    ranks, one = yield [setting, single_process_setting(setting)]
    found = compare(name, one, ranks, rtol=rtol)
    if found.within or not further or _is_certain(found, one, ranks):
        return found
    if is_single(precision):
        ranks_double, one_double = yield [
            dataclasses.replace(setting, double=True),
            dataclasses.replace(single_process_setting(setting), double=True),
        ]
        failed = next((answer for answer in (ranks_double, one_double) if isinstance(answer, str)), None)
        if failed is None:
            tensors = TENSORS_DOUBLE * max(1.0, rtol / RTOL)
            double = compare(
                name, one_double, ranks_double, rtol=RTOL_DOUBLE if rtol <= RTOL else rtol, tensor_rtol=tensors
            )
            if not double.within:
                found.double, found.decided, found.hints = double, False, double.hints
                return found
            controls = yield [single_process_setting(setting, number + 1) for number in range(_CONTROLS)]
            found = compare(name, one, ranks, rtol=rtol, controls=controls, factor=_FAR)
            found.double = double
            if not found.within:
                other = dataclasses.replace(setting, seed=setting.seed + 1)
                again = yield [
                    other,
                    single_process_setting(other),
                    *(single_process_setting(other, number + 1) for number in range(_CONTROLS)),
                ]
                found.decided = compare(name, again[1], again[0], rtol=rtol, controls=again[2:], factor=_FAR).within
            return found
        found.double_refusal = failed
    controls = yield [single_process_setting(setting, number + 1) for number in range(_CONTROLS_ALONE)]
    decided = compare(name, one, ranks, rtol=rtol, controls=controls)
    decided.double_refusal = found.double_refusal
    return decided


def single_process_setting(setting: Setting, control: int = 0) -> Setting:
    """Returns the setting of the one process that matches a setting of ranks."""
    return dataclasses.replace(setting, ranks=None, shares=0, control=control)


def is_single(precision: Any) -> bool:
    """Returns whether Lightning's ``precision`` is plain single precision."""
    return str(precision) in ("None", "32", "32-true")


def _is_certain(found: Comparison, one: Record, ranks: Record) -> bool:
    """Returns whether the runs differ so clearly that no further run can change the verdict."""
    if not found.comparable or one.initial != ranks.initial or one.drew is not None or ranks.drew is not None:
        return True
    if any(mine.digest != theirs.digest for mine, theirs in zip(one.steps, ranks.steps, strict=True)):
        return True
    first = found.rows[0]
    limit = max(_HOPELESS, _HOPELESS_FACTOR * found.rtol)
    return any(pair is not None and not pair.difference < limit for pair in (first.loss, first.norm))
