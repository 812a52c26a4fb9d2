"""Callbacks that set the learning rate along published curves: WSD, warm restarts, cycles, and rewarming.

- `WSD`: MiniCPM, Hu et al. 2024, arXiv 2404.06395; Scaling Laws and Compute-Optimal Training Beyond Fixed Training
  Durations, Hägele et al. 2024, arXiv 2405.18392 (the decay `1 - sqrt`).
- `WarmRestarts`: SGDR: Stochastic Gradient Descent with Warm Restarts, Loshchilov & Hutter 2017, arXiv 1608.03983.
- `Cyclic`: Cyclical Learning Rates for Training Neural Networks, Smith 2017, arXiv 1506.01186.
- `Rewarm`: Continual Pre-Training of Large Language Models: How to (re)warm your model?, Gupta et al. 2023, arXiv
  2308.04014; Simple and Scalable Strategies to Continually Pre-train Large Language Models, Ibrahim et al. 2024, arXiv
  2403.08763.

Departure of all: lengths are fractions of training, not numbers of steps.
"""

from __future__ import annotations

import math
from typing import Literal

from dlo_framework.errors import DloError, check_choice, check_number
from dlo_plugins.callbacks.lr_schedule import LearningRateSchedule

Decay = Literal["linear", "cosine", "sqrt", "exponential"]
DECAYS = ("linear", "cosine", "sqrt", "exponential")
CycleMode = Literal["triangular", "triangular2", "exp_range"]
MODES = ("triangular", "triangular2", "exp_range")


def decay_factor(position: float, final: float, shape: Decay) -> float:
    """Returns the factor at a position of a decay from 1 to a final value.

    Args:
        position: Position in the decay, 0 to 1.
        final: Factor at the end; above 0 for `exponential`.
        shape: Curve: `linear`; `cosine`, half a cosine; `sqrt`, one minus the root; `exponential`, equal ratios.
    """
    if shape == "exponential":
        return final**position
    left = {
        "linear": 1 - position,
        "cosine": 0.5 * (1 + math.cos(math.pi * position)),
        "sqrt": 1 - math.sqrt(position),
    }[shape]
    return final + (1 - final) * left


def cycle_position(fraction: float, cycles: int, ratio: float = 1.0) -> tuple[int, float]:
    """Returns the cycle of a fraction of training, and the position in it, 0 to 1.

    Args:
        fraction: Fraction of training, 0 to 1.
        cycles: Number of cycles in the run.
        ratio: Ratio of the lengths of a cycle and the one before.
    """
    total = sum(ratio**number for number in range(cycles))
    begin = 0.0
    for number in range(cycles):
        length = ratio**number / total
        # A step that begins a cycle is in it, in spite of the rounding of sums of lengths.
        if fraction < begin + length - 1e-12 or number == cycles - 1:
            return number, min(1.0, max(0.0, (fraction - begin) / length))
        begin += length
    raise AssertionError("a schedule has at least one cycle")


def triangle(position: float) -> float:
    """Returns the height at a position of a cycle: 0 at its ends, and 1 in its middle."""
    return 1 - abs(2 * position - 1)


class WSD(LearningRateSchedule):
    """Warms the learning rate up, keeps it, and decays it at the end of training (warm-up, stable, decay).

    A checkpoint of the stable phase continues for any length: a resumed run with a larger ``trainer.max_steps`` only
    decays later, and one with a smaller limit decays from there.

    Args:
        max_lr: Highest lr of all parameter groups, or a list with one for each; None uses each group's own.
        warmup: Fraction of training in which the lr rises linearly from 0.
        decay: Fraction of training, at its end, in which the lr falls.
        final: Ratio of the last lr to the highest.
        shape: Curve of the fall: `sqrt` (one minus the root), `linear`, `cosine` or `exponential`.

    Raises:
        DloError: If a value is out of range, there is another scheduler, or training has no end.
    """

    def __init__(
        self,
        max_lr: float | list[float] | None = None,
        warmup: float = 0.01,
        decay: float = 0.2,
        final: float = 0.0,
        shape: Decay = "sqrt",
    ) -> None:
        super().__init__(max_lr)
        if not (warmup >= 0 and decay > 0 and warmup + decay <= 1):
            raise DloError(
                "WSD: warmup must be at least 0, decay above 0, and their sum at most 1, got"
                f" {warmup} and {decay}; the defaults are 0.01 and 0.2"
            )
        _check_final("WSD", final, shape)
        self.warmup, self.decay, self.final, self.shape = warmup, decay, final, shape

    def lr_factor(self, fraction: float) -> float:
        """Returns the ratio of the lr to its maximum after ``fraction`` of training."""
        if fraction < self.warmup:
            return fraction / self.warmup
        position = max(0.0, (fraction - (1 - self.decay)) / self.decay)
        return decay_factor(min(1.0, position), self.final, self.shape)


class WarmRestarts(LearningRateSchedule):
    """Lowers the learning rate along half a cosine, several times over training, each time from the top.

    With `cycles: 4` and `ratio: 2`, the cycles have 1/15, 2/15, 4/15 and 8/15 of training.

    Args:
        max_lr: Highest lr of all parameter groups, or a list with one for each; None uses each group's own.
        cycles: Number of cycles in the run.
        ratio: Ratio of the lengths of a cycle and the one before (`T_mult` of the paper).
        final: Ratio of the last lr of a cycle to the highest.
        peak_decay: Ratio of the highest lr of a cycle and of the one before.

    Raises:
        DloError: If a value is out of range, there is another scheduler, or training has no end.
    """

    def __init__(
        self,
        max_lr: float | list[float] | None = None,
        cycles: int = 4,
        ratio: float = 1.0,
        final: float = 0.0,
        peak_decay: float = 1.0,
    ) -> None:
        super().__init__(max_lr)
        _check_cycles("WarmRestarts", cycles)
        check_number("WarmRestarts: ratio", ratio, "above 0", "1 and 2 are usual")
        _check_peaks("WarmRestarts", final, peak_decay)
        self.cycles, self.ratio, self.final, self.peak_decay = cycles, ratio, final, peak_decay

    def lr_factor(self, fraction: float) -> float:
        """Returns the ratio of the lr to its maximum after ``fraction`` of training."""
        number, position = cycle_position(fraction, self.cycles, self.ratio)
        peak = max(self.final, self.peak_decay**number)
        return peak * decay_factor(position, self.final / peak, "cosine")


class Cyclic(LearningRateSchedule):
    """Raises and lowers the learning rate linearly between two values, several times over training.

    Args:
        max_lr: Highest lr of all parameter groups, or a list with one for each; None uses each group's own.
        cycles: Number of cycles in the run; each is one rise and one fall.
        low: Ratio of the lowest lr to the highest.
        mode: Height of the cycles: `triangular` for the same in all, `triangular2` for half of it in each next one,
            `exp_range` for `gamma` to the power of the progress in percent.
        gamma: Factor of the height per percent of training, for `exp_range`.
        momentum: Highest momentum, at the lowest lr, and lowest, at the highest lr; None leaves it alone.

    Raises:
        DloError: If a value is out of range, there is another scheduler, or training has no end.
    """

    def __init__(
        self,
        max_lr: float | list[float] | None = None,
        cycles: int = 4,
        low: float = 0.1,
        mode: CycleMode = "triangular",
        gamma: float = 0.98,
        momentum: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(max_lr)
        _check_cycles("Cyclic", cycles)
        check_choice("Cyclic: mode", mode, MODES, "leave it out")
        check_number("Cyclic: low", low, "at least 0 and below 1", "0.1 to 0.3 are usual")
        check_number("Cyclic: gamma", gamma, "above 0 and at most 1", "leave it out")
        self.cycles, self.low, self.mode, self.gamma, self.momentum = cycles, low, mode, gamma, momentum

    def _height(self, fraction: float) -> float:
        number, position = cycle_position(fraction, self.cycles)
        scale = {"triangular": 1.0, "triangular2": 0.5**number, "exp_range": self.gamma ** (100 * fraction)}[self.mode]
        return scale * triangle(position)

    def lr_factor(self, fraction: float) -> float:
        """Returns the ratio of the lr to its maximum after ``fraction`` of training."""
        return self.low + (1 - self.low) * self._height(fraction)

    def momentum_at(self, fraction: float) -> float | None:
        """Returns the momentum after ``fraction`` of training; None to leave it alone."""
        if self.momentum is None:
            return None
        high, lowest = self.momentum
        return high - (high - lowest) * self._height(fraction)


class Rewarm(LearningRateSchedule):
    """Warms the learning rate up again at points of the run, for example where the data change, and decays it between.

    Each phase rises linearly from where the one before has ended, and then falls along half a cosine. A run that starts
    from trained weights, whose lr was at its end, has one phase: `points: [0.0]`.

    Args:
        max_lr: Highest lr of all parameter groups, or a list with one for each; None uses each group's own.
        points: Fractions of training at which phases begin, ascending, the first 0.
        warmup: Fraction of a phase in which the lr rises.
        final: Ratio of the lr at the end of a phase, and at the start of the first, to the highest.
        peak_decay: Ratio of the highest lr of a phase and of the one before.

    Raises:
        DloError: If a value is out of range, there is another scheduler, or training has no end.
    """

    def __init__(
        self,
        max_lr: float | list[float] | None = None,
        points: list[float] | None = None,
        warmup: float = 0.02,
        final: float = 0.1,
        peak_decay: float = 1.0,
    ) -> None:
        super().__init__(max_lr)
        self.points = [0.0] if points is None else list(points)
        ascending = sorted(set(self.points)) == self.points
        if not self.points or self.points[0] != 0 or not ascending or self.points[-1] >= 1:
            raise DloError(
                f"Rewarm: points must be ascending fractions below 1, the first 0, got {points}; set [0.0, 0.5]"
            )
        check_number("Rewarm: warmup", warmup, "at least 0 and below 1", "0.02 is usual")
        _check_peaks("Rewarm", final, peak_decay)
        self.warmup, self.final, self.peak_decay = warmup, final, peak_decay

    def lr_factor(self, fraction: float) -> float:
        """Returns the ratio of the lr to its maximum after ``fraction`` of training."""
        number = max(index for index, point in enumerate(self.points) if point <= fraction + 1e-12)
        end = self.points[number + 1] if number + 1 < len(self.points) else 1.0
        position = min(1.0, max(0.0, (fraction - self.points[number]) / (end - self.points[number])))
        peak = max(self.final, self.peak_decay**number)
        if position < self.warmup:
            return self.final + (peak - self.final) * position / self.warmup
        after = (position - self.warmup) / (1 - self.warmup)
        return peak * decay_factor(after, self.final / peak, "cosine")


def _check_cycles(what: str, cycles: int) -> None:
    check_number(f"{what}: cycles", cycles, "at least 1", "4 is the default")


def _check_peaks(what: str, final: float, peak_decay: float) -> None:
    check_number(f"{what}: peak_decay", peak_decay, "above 0 and at most 1", "leave it out")
    _check_final(what, final, "cosine")


def _check_final(what: str, final: float, shape: str) -> None:
    check_choice(f"{what}: shape", shape, DECAYS, "leave it out")
    least = "above 0" if shape == "exponential" else "at least 0"
    check_number(f"{what}: final", final, f"{least} and below 1", "0.1 is usual")
