"""1cycle schedule: one rise and one fall of the learning rate, with the opposite curve of momentum.

Leslie N. Smith, "A disciplined approach to neural network hyper-parameters: Part 1", 2018 (arXiv 1803.09820), and
"Super-Convergence" (Smith and Topin, 2017, arXiv 1708.07120). Two published forms, of fastai and torch, differ in their
constants and in the end of a phase; this module equals both to the last digit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from lightning.pytorch import Trainer

from dlo_framework.errors import check_choice, check_number
from dlo_framework.progress import optimizer_steps
from dlo_plugins.schedules.lr_curves import LearningRateSchedule

Anneal = Literal["cos", "linear"]


@dataclasses.dataclass(frozen=True)
class Preset:
    """Constants of one published form.

    Attributes:
        pct_start: Fraction of training in which the lr rises.
        div_factor: Ratio of the maximum lr to the first one.
        final_div_factor: Ratio of the maximum lr to the last one.
        last_step_is_the_end: Whether a phase ends with its last step (torch), or one step later (fastai).
    """

    pct_start: float
    div_factor: float
    final_div_factor: float
    last_step_is_the_end: bool


PRESETS = {
    "fastai": Preset(pct_start=0.25, div_factor=25.0, final_div_factor=1e5, last_step_is_the_end=False),
    # torch divides the *initial* lr by its final_div_factor of 1e4.
    "torch": Preset(pct_start=0.3, div_factor=25.0, final_div_factor=25e4, last_step_is_the_end=True),
}


def anneal(start: float, end: float, position: float, how: Anneal) -> float:
    """Returns the value at ``position``, 0 to 1, between ``start`` and ``end``."""
    if how == "linear":
        return start + position * (end - start)
    return end + (start - end) / 2 * (1 + math.cos(math.pi * position))


def piecewise(fraction: float, ends: tuple[float, ...], values: tuple[float, ...], how: Anneal) -> float:
    """Returns the value at ``fraction`` of a curve that goes from one of ``values`` to the next in each phase.

    Args:
        fraction: Fraction of training before this step, 0 to 1.
        ends: Fraction at which each phase ends, ascending.
        values: Values at the boundaries of the phases, one more than phases.
        how: Curve within a phase.
    """
    begin = 0.0
    for index, end in enumerate(ends):
        if fraction <= end or index == len(ends) - 1:
            position = (fraction - begin) / (end - begin) if end > begin else 1.0
            return anneal(values[index], values[index + 1], min(1.0, position), how)
        begin = end
    raise AssertionError("a schedule has at least one phase")


def phase_ends(pct_start: float, three_phase: bool, step: float) -> tuple[float, ...]:
    """Returns the fraction of training at which each phase ends.

    Args:
        pct_start: Fraction of training in which the lr rises.
        three_phase: Whether the lr falls to its first value in as many steps as it rose, and further in a third phase.
        step: Fraction of training of one optimizer step if a phase ends with its last step (torch); 0 if it ends with
            the first step of the next phase (fastai).
    """
    rise = pct_start - step
    return (rise, 2 * rise, 1 - step) if three_phase else (rise, 1 - step)


class OneCycle(LearningRateSchedule):
    """Raises the learning rate to its maximum and lowers it to almost 0, once over all of training.

    The lr is set before each optimizer step from the fraction of samples seen, so accumulation, a changing batch size
    and a resume do not shift it. Momentum, or Adam's first beta, has the opposite curve. Another scheduler is an error.

    Args:
        max_lr: Highest lr of all parameter groups, or a list with one for each; None uses each group's own. A single
            value keeps the groups' ratios, for example of layer-wise decay.
        preset: Published form: ``fastai`` (25% rise, from max/25, to max/1e5) or ``torch`` (30%, from max/25, to
            max/25e4), equal to ``fastai.callback.schedule.fit_one_cycle`` and ``torch.optim.lr_scheduler.OneCycleLR``.
        pct_start: Fraction of training in which the lr rises; None uses the preset's.
        div_factor: Ratio of ``max_lr`` to the first lr; None uses the preset's.
        final_div_factor: Ratio of ``max_lr`` to the last lr; None uses the preset's.
        anneal: Curve, ``cos`` or ``linear``.
        three_phase: Whether the lr falls to its first value in as many steps as it rose, then to the last in a third
            phase (Smith's own form).
        cycle_momentum: Whether to cycle momentum (SGD) or the first beta (Adam).
        momentum: Highest momentum, at the start and the end, and lowest, at the highest lr.

    Raises:
        DloError: If a value is out of range, there is another scheduler, or training has no end.
    """

    def __init__(
        self,
        max_lr: float | list[float] | None = None,
        preset: Literal["fastai", "torch"] = "fastai",
        pct_start: float | None = None,
        div_factor: float | None = None,
        final_div_factor: float | None = None,
        anneal: Anneal = "cos",
        three_phase: bool = False,
        cycle_momentum: bool = True,
        momentum: tuple[float, float] = (0.95, 0.85),
    ) -> None:
        check_choice("OneCycle: preset", preset, PRESETS, "leave it out")
        super().__init__(max_lr)
        chosen = PRESETS[preset]
        self.pct_start = chosen.pct_start if pct_start is None else pct_start
        self.div_factor = chosen.div_factor if div_factor is None else div_factor
        self.final_div_factor = chosen.final_div_factor if final_div_factor is None else final_div_factor
        self.last_step_is_the_end = chosen.last_step_is_the_end
        self.anneal = anneal
        self.three_phase = three_phase
        self.cycle_momentum = cycle_momentum
        self.momentum = momentum
        self._ends: tuple[float, ...] = ()
        limit = 0.5 if three_phase else 1.0
        rule = f"above 0 and at most {limit}" + (" with three phases" if three_phase else "")
        check_number("OneCycle: pct_start", self.pct_start, rule, f"the default of {preset} is {chosen.pct_start}")
        for name in ("div_factor", "final_div_factor"):  # The lr starts and ends below its maximum.
            check_number(f"OneCycle: {name}", getattr(self, name), "at least 1", "leave it out for the preset's")

    def prepare(self, trainer: Trainer) -> None:
        """Sets the ends of the phases."""
        step = 1 / optimizer_steps(trainer) if self.last_step_is_the_end else 0.0
        self._ends = phase_ends(self.pct_start, self.three_phase, step)

    def lr_factor(self, fraction: float) -> float:
        """Returns the ratio of the lr to its maximum after ``fraction`` of training."""
        initial, final = 1 / self.div_factor, 1 / self.final_div_factor
        values = (initial, 1.0, initial, final) if self.three_phase else (initial, 1.0, final)
        return piecewise(fraction, self._ends, values, self.anneal)

    def momentum_at(self, fraction: float) -> float | None:
        """Returns the momentum after ``fraction`` of training; None if it is not cycled."""
        if not self.cycle_momentum:
            return None
        high, low = self.momentum
        values = (high, low, high, high) if self.three_phase else (high, low, high)
        return piecewise(fraction, self._ends, values, self.anneal)
