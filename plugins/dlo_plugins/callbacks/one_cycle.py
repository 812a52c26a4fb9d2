"""1cycle schedule: one rise and one fall of the learning rate, with the opposite curve of momentum.

Leslie N. Smith, "A disciplined approach to neural network hyper-parameters: Part 1", 2018 (arXiv 1803.09820), and
"Super-Convergence" (Smith and Topin, 2017, arXiv 1708.07120). Two published forms, of fastai and torch, differ in their
constants and in the end of a phase; this module equals both to the last digit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.errors import DloError
from dlo_framework.progress import fraction_seen, optimizer_steps

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


class OneCycle(Callback):
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
        if preset not in PRESETS:
            raise DloError(f"OneCycle: preset must be one of {', '.join(PRESETS)}, got {preset!r}; leave it out")
        chosen = PRESETS[preset]
        self.max_lr = max_lr
        self.pct_start = chosen.pct_start if pct_start is None else pct_start
        self.div_factor = chosen.div_factor if div_factor is None else div_factor
        self.final_div_factor = chosen.final_div_factor if final_div_factor is None else final_div_factor
        self.last_step_is_the_end = chosen.last_step_is_the_end
        self.anneal = anneal
        self.three_phase = three_phase
        self.cycle_momentum = cycle_momentum
        self.momentum = momentum
        self._peaks: list[float] = []
        self._ends: tuple[float, ...] = ()
        limit = 0.5 if three_phase else 1.0
        if not 0 < self.pct_start <= limit:
            raise DloError(
                f"OneCycle: pct_start must be above 0 and at most {limit}"
                f"{' with three phases' if three_phase else ''}, got {self.pct_start}; {chosen.pct_start} is the"
                f" default of preset {preset}"
            )
        if min(self.div_factor, self.final_div_factor) < 1:
            raise DloError(
                "OneCycle: div_factor and final_div_factor must be at least 1, as the lr starts and ends below its"
                f" maximum, got {self.div_factor} and {self.final_div_factor}; leave them out for the preset's"
            )
        if any(lr <= 0 for lr in (max_lr if isinstance(max_lr, list) else [max_lr] if max_lr is not None else [])):
            raise DloError(f"OneCycle: max_lr must be above 0, got {max_lr}; leave it out for the optimizer's lr")

    def state_dict(self) -> dict[str, Any]:
        """Returns the groups' highest lr, as a restored optimizer has only the current one."""
        return {"peaks": self._peaks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the highest lr of the resumed run."""
        self._peaks = list(state_dict["peaks"])

    def set_max_lr(self, lr: float) -> None:
        """Sets the highest lr that LRFinder has found; scales a list of them, and those of the groups."""
        self.max_lr = group_peaks(self.max_lr, lr) if isinstance(self.max_lr, list) else lr
        self._peaks = group_peaks(self._peaks, lr) if self._peaks else []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Resets the highest lr of an earlier fit, of another optimizer. A resumed state is loaded after this."""
        if stage == "fit":
            self._peaks = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that nothing else sets the lr, and finds each group's highest lr."""
        if trainer.lr_scheduler_configs:
            others = ", ".join(type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs)
            raise DloError(
                f"OneCycle: {type(pl_module).__name__} must configure no scheduler, as OneCycle sets the learning rate,"
                f" got {others}; remove one of them (ImageClassifier: schedule: constant)"
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if not self._peaks:
            self._peaks = group_peaks([float(group["lr"]) for group in groups], self.max_lr)
        if len(self._peaks) != len(groups):
            raise DloError(
                f"OneCycle: max_lr must have one value for each of the {len(groups)} parameter groups, got"
                f" {len(self._peaks)}; set a single value to scale them all"
            )
        fraction_seen(trainer)  # Raises if training has no end.
        step = 1 / optimizer_steps(trainer) if self.last_step_is_the_end else 0.0
        self._ends = phase_ends(self.pct_start, self.three_phase, step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Sets the lr of the next optimizer step."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        fraction = fraction_seen(trainer)
        factor = self.lr_factor(fraction)
        momentum = self.momentum_at(fraction) if self.cycle_momentum else None
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, self._peaks, strict=True):
            group["lr"] = peak * factor
            if momentum is not None:
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                elif "momentum" in group:
                    group["momentum"] = momentum

    def lr_factor(self, fraction: float) -> float:
        """Returns the ratio of the lr to its maximum after ``fraction`` of training."""
        initial, final = 1 / self.div_factor, 1 / self.final_div_factor
        values = (initial, 1.0, initial, final) if self.three_phase else (initial, 1.0, final)
        return piecewise(fraction, self._ends, values, self.anneal)

    def momentum_at(self, fraction: float) -> float:
        """Returns the momentum after ``fraction`` of training."""
        high, low = self.momentum
        values = (high, low, high, high) if self.three_phase else (high, low, high)
        return piecewise(fraction, self._ends, values, self.anneal)


def group_peaks(current: list[float], max_lr: float | list[float] | None) -> list[float]:
    """Returns the highest lr of each parameter group.

    Args:
        current: Groups' lr when the optimizer was built.
        max_lr: Highest lr as in :class:`OneCycle`.
    """
    if max_lr is None:
        return current
    if isinstance(max_lr, list):
        return list(max_lr)
    highest = max(current)
    return [max_lr * lr / highest for lr in current] if highest > 0 else [max_lr] * len(current)
