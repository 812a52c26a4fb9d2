"""Mathematics of a learning-rate sweep: its rates, the smoothed loss, the stop, and the suggested rates.

The sweep is Leslie N. Smith's range test ("Cyclical Learning Rates for Training Neural Networks", 2017,
arXiv 1506.01186) in fastai's form (``fastai/callback/schedule.py``), with fastai's constants and suggestions.
Departures from fastai: the last step reaches the highest rate, a loss that may be negative does not stop the sweep at
once, and ``valley`` does not read before the first point.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from dlo_framework.errors import DloError
from dlo_framework.registry.named_functions import NamedFunctions


def sweep_rates(min_lr: float, max_lr: float, steps: int) -> list[float]:
    """Returns ``steps`` learning rates from ``min_lr`` to ``max_lr``, each the same multiple of the one before."""
    ratio = math.log(max_lr / min_lr)
    return [min_lr * math.exp(ratio * step / (steps - 1)) for step in range(steps)]


#: Function that suggests a rate from the rates of a curve, ascending, and the smoothed losses; None if it cannot.
Suggest = Callable[[Sequence[float], Sequence[float]], float | None]

#: Methods that suggest a rate, by the name that ``LRFinder.suggestion`` has; the first is the default.
SUGGESTIONS: NamedFunctions[Suggest] = NamedFunctions("LRFinder suggestion", "dlo_framework.lr_suggestions")


@dataclasses.dataclass
class Sweep:
    """Points of a sweep, added one at a time.

    Attributes:
        steps: Number of points of a complete sweep.
        beta: Weight of the past in the smoothed loss, an exponential moving average corrected for its start at 0.
        stop_factor: Factor over its lowest value at which the smoothed loss ends the sweep.
        rates: Learning rates so far.
        losses: Loss at each rate.
        smoothed: Smoothed loss at each rate; suggestions use it.
        stopped: Reason for which the sweep ended before its last step; None if it did not.
    """

    steps: int
    beta: float = 0.98
    stop_factor: float = 4.0
    rates: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    smoothed: list[float] = dataclasses.field(default_factory=list)
    stopped: str | None = None
    _average: float = 0.0

    def add(self, rate: float, loss: float) -> bool:
        """Adds the next point; returns whether to continue."""
        self.rates.append(rate)
        self.losses.append(loss)
        self._average = self.beta * self._average + (1 - self.beta) * loss
        self.smoothed.append(self._average / (1 - self.beta ** len(self.losses)))
        best = min(self.smoothed)
        if not math.isfinite(loss):
            self.stopped = f"the loss became {loss}"
        elif self.smoothed[-1] > best + (self.stop_factor - 1) * abs(best):
            self.stopped = f"the smoothed loss rose to {self.smoothed[-1]:.4g}, above {self.stop_factor:g} x {best:.4g}"
        return self.stopped is None and len(self.rates) < self.steps

    def trimmed(self) -> tuple[list[float], list[float]]:
        """Returns rates and smoothed losses without both ends.

        The first tenth of a complete sweep is left out, as the average has few values there; so are the last five
        points, where the loss diverges, and everything from the first NaN on.
        """
        kept = slice(self.steps // 10, -5)
        rates, losses = self.rates[kept], self.smoothed[kept]
        end = next((at for at, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
        return rates[:end], losses[:end]


@SUGGESTIONS.register("valley")
def valley(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Returns the rate in the middle of the longest falling stretch: at a third plus a sixth of its length.

    The stretch is the longest strictly falling subsequence, which noise interrupts less than a run of neighbours. Its
    position is computed as if it had no gaps before its last point.
    """
    lengths: list[int] = []  # length of the longest falling subsequence that ends at each point
    for at, loss in enumerate(losses):
        longest = max((lengths[before] for before in range(at) if losses[before] > loss), default=0)
        lengths.append(longest + 1)
    longest = max(lengths)
    if longest < 2:
        return None
    start = lengths.index(longest) - longest
    third = longest / 3
    return rates[max(0, start + int(third) + int(third / 2))]


@SUGGESTIONS.register("steep")
def steep(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Returns the rate with the steepest fall of the loss over the logarithm of the rate."""
    slopes = np.diff(np.asarray(losses)) / np.diff(np.log(rates))
    return rates[int(slopes.argmin())]


@SUGGESTIONS.register("minimum")
def minimum(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Returns a tenth of the rate with the lowest loss."""
    return rates[int(np.argmin(losses))] / 10


@SUGGESTIONS.register("slide")
def slide(
    rates: Sequence[float], losses: Sequence[float], *, width: int = 15, threshold: float = 0.005
) -> float | None:
    """Returns the rate at the left edge of an interval that slides down from the end of the curve.

    The interval stops where the slopes of the loss at its two edges agree, which is before the loss bends upwards.

    Args:
        rates: Learning rates, ascending.
        losses: Smoothed losses.
        width: Number of points between the two edges.
        threshold: Largest difference of two slopes that agree, in loss per point.

    Returns:
        The rate; None if the curve is not wider than the interval.
    """
    count = len(losses)
    if count <= width:
        return None
    slopes = np.gradient(np.asarray(losses))
    right = count - 1
    found = right - width
    left = found
    while left >= 0 and abs(slopes[right] - slopes[left]) > threshold:
        found = left
        left, right = left - 1, right - 1
    return rates[found]


def suggest(rates: Sequence[float], losses: Sequence[float]) -> tuple[dict[str, float | None], dict[str, DloError]]:
    """Returns the suggestions of all imported methods for a curve, and the errors of those that failed.

    Args:
        rates: Learning rates, ascending.
        losses: Smoothed losses.

    Returns:
        The rate by name, None where the curve does not allow one or the method failed; and by name the error of each
        method that raised, or returned no rate.
    """
    found: dict[str, float | None] = {}
    errors: dict[str, DloError] = {}
    for name, method in SUGGESTIONS.loaded().items():
        try:
            found[name] = _call(name, method, rates, losses)
        except DloError as error:
            found[name], errors[name] = None, error
    return found, errors


def _call(name: str, method: Suggest, rates: Sequence[float], losses: Sequence[float]) -> float | None:
    if len(rates) < 2:
        return None
    try:
        found = method(rates, losses)
        if found is None or (found > 0 and np.isfinite(found)):
            return None if found is None else float(found)
        problem = f"the rate {found}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    raise DloError(f"suggestion {name} must return a positive rate or None, got {problem}; correct {method.__module__}")


def rescale_rates(rates: Sequence[float], highest: float) -> list[float]:
    """Returns the groups' rates in the same ratios with ``highest`` as the highest; equal rates if all are 0."""
    top = max(rates)
    return [highest * rate / top for rate in rates] if top > 0 else [highest] * len(rates)
