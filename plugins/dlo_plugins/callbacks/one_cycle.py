"""The 1cycle schedule: one rise and one fall of the learning rate, momentum the other way round.

Leslie N. Smith, "A disciplined approach to neural network hyper-parameters: Part 1", 2018 (arXiv 1803.09820), and
"Super-Convergence" (Smith and Topin, 2017, arXiv 1708.07120). Two published forms differ in their constants and in
where a phase ends; both are here, to the last digit.
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
    """The constants of one published form.

    Attributes:
        pct_start: fraction of training in which the lr rises.
        div_factor: the lr starts at its maximum over this.
        final_div_factor: and ends at its maximum over this.
        last_step_is_the_end: torch reaches the end of a phase with the phase's last step, fastai one step later.
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
    """Returns the value at ``position``, 0 to 1, on the way from ``start`` to ``end``."""
    if how == "linear":
        return start + position * (end - start)
    return end + (start - end) / 2 * (1 + math.cos(math.pi * position))


def piecewise(fraction: float, ends: tuple[float, ...], values: tuple[float, ...], how: Anneal) -> float:
    """Returns the value at ``fraction`` of a curve that goes from one of ``values`` to the next in each phase.

    Args:
        fraction: how much of training lies before this step, 0 to 1.
        ends: the fraction at which each phase ends, ascending.
        values: one more than there are phases.
        how: the curve within a phase.
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
        pct_start: fraction of training in which the lr rises.
        three_phase: whether the fall to the initial lr takes as long as the rise, and a third phase goes on down.
        step: the fraction of training that is one optimizer step, where a phase ends with its last step (torch);
            0 where it ends with the next phase's first (fastai).
    """
    rise = pct_start - step
    return (rise, 2 * rise, 1 - step) if three_phase else (rise, 1 - step)


class OneCycle(Callback):
    """Raises the learning rate to its maximum and lowers it to nearly nothing, once over the whole training.

    The lr is set before each optimizer step from the fraction of samples seen, so accumulation, a batch size that
    changes and a resume don't shift it. Momentum, or Adam's first beta, goes the other way. It refuses to run
    beside another scheduler.

    Args:
        max_lr: the highest lr, of all parameter groups or a list with one of each; None takes each group's own.
            A single value keeps the groups' ratios, layer-wise decay say.
        preset: ``fastai`` (25% rise, from max/25, to max/1e5) or ``torch`` (30%, from max/25, to max/25e4), equal
            to ``fastai.callback.schedule.fit_one_cycle`` and ``torch.optim.lr_scheduler.OneCycleLR``.
        pct_start: fraction of training in which the lr rises; None takes the preset's.
        div_factor: the lr starts at max_lr / div_factor; None takes the preset's.
        final_div_factor: and ends at max_lr / final_div_factor; None takes the preset's.
        anneal: the curve, ``cos`` or ``linear``.
        three_phase: fall to the initial lr as fast as it rose, then in a third phase to the end (Smith's own form).
        cycle_momentum: whether to cycle momentum (SGD) or the first beta (Adam).
        momentum: its highest value, at the start and the end, and its lowest, where the lr is highest.

    Raises:
        DloError: on values out of range, another scheduler, or a training without an end.
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
            raise DloError(f"OneCycle: preset is one of {', '.join(PRESETS)}, but was {preset!r}")
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
                f"OneCycle: pct_start is a fraction above 0 and at most {limit}"
                f"{' with three phases' if three_phase else ''}, but was {self.pct_start}"
            )
        if min(self.div_factor, self.final_div_factor) < 1:
            raise DloError(
                "OneCycle: div_factor and final_div_factor are at least 1, for the lr starts and ends below its"
                f" maximum, but were {self.div_factor} and {self.final_div_factor}"
            )
        if any(lr <= 0 for lr in (max_lr if isinstance(max_lr, list) else [max_lr] if max_lr is not None else [])):
            raise DloError(f"OneCycle: max_lr is above 0, but was {max_lr}")

    def state_dict(self) -> dict[str, Any]:
        """The groups' highest lr: an optimizer that is restored has the lr of the moment only."""
        return {"peaks": self._peaks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the peaks of the run that is resumed."""
        self._peaks = list(state_dict["peaks"])

    def set_max_lr(self, lr: float) -> None:
        """Takes the highest lr that LRFinder has found; a list is scaled to it, and so are peaks found already."""
        self.max_lr = group_peaks(self.max_lr, lr) if isinstance(self.max_lr, list) else lr
        self._peaks = group_peaks(self._peaks, lr) if self._peaks else []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forgets the peaks of a fit before, whose optimizer was another. What is resumed is loaded after this."""
        if stage == "fit":
            self._peaks = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that nothing else sets the lr, and finds each group's peak."""
        if trainer.lr_scheduler_configs:
            others = ", ".join(type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs)
            raise DloError(
                f"OneCycle sets the learning rate itself, but {type(pl_module).__name__} also configures {others};"
                " remove one of them (ImageClassifier: schedule: constant)"
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if not self._peaks:
            self._peaks = group_peaks([float(group["lr"]) for group in groups], self.max_lr)
        if len(self._peaks) != len(groups):
            raise DloError(
                f"OneCycle: one max_lr a parameter group: {len(self._peaks)} given, {len(groups)} groups;"
                " give a single value to scale them all"
            )
        fraction_seen(trainer)  # Refuses a training without an end.
        step = 1 / optimizer_steps(trainer) if self.last_step_is_the_end else 0.0
        self._ends = phase_ends(self.pct_start, self.three_phase, step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Sets the lr of the optimizer step that begins."""
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
        """Returns the lr over its maximum, after ``fraction`` of training."""
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
        current: the groups' lr as the optimizer was built.
        max_lr: see :class:`OneCycle`.
    """
    if max_lr is None:
        return current
    if isinstance(max_lr, list):
        return list(max_lr)
    highest = max(current)
    return [max_lr * lr / highest for lr in current] if highest > 0 else [max_lr] * len(current)
