"""Callbacks that set the learning rate from the fraction of training that is done: 1cycle, WSD, restarts, cycles.

- `OneCycle`: one rise and one fall of the learning rate, with the opposite curve of momentum. Leslie N. Smith, "A
  disciplined approach to neural network hyper-parameters: Part 1", 2018 (arXiv 1803.09820), and "Super-Convergence"
  (Smith and Topin, 2017, arXiv 1708.07120). The published forms of fastai and torch differ in their constants and in
  the end of a phase; this one equals both to the last digit.
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

import contextlib
import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule, Trainer

from dlo_framework.callback import PluginCallback, callbacks_of
from dlo_framework.errors import DloError, check_choice, check_number
from dlo_framework.fake_kernels import fake_copy
from dlo_framework.progress import fraction_seen, optimizer_steps
from dlo_framework.task import Task


class LearningRateSchedule(PluginCallback, ABC):
    """Sets the lr before each optimizer step to a factor of its highest value.

    The factor is a function of the fraction of samples seen, so accumulation, a changing batch size and a resume do not
    shift it. Another scheduler is an error.

    Args:
        max_lr: Highest lr of all parameter groups, or a list with one for each; None uses each group's own. A single
            value keeps the groups' ratios, for example of layer-wise decay.

    Raises:
        DloError: If it is out of range; later, if there is another scheduler, or training has no end.
    """

    def __init__(self, max_lr: float | list[float] | None = None) -> None:
        if any(lr <= 0 for lr in (max_lr if isinstance(max_lr, list) else [max_lr] if max_lr is not None else [])):
            raise DloError(
                f"{type(self).__name__}: max_lr must be above 0, got {max_lr}; leave it out for the optimizer's lr"
            )
        self.max_lr = max_lr
        self._peaks: list[float] = []

    @abstractmethod
    def lr_factor(self, fraction: float) -> float:
        """Returns the ratio of the lr to its maximum after ``fraction`` of training."""

    def momentum_at(self, fraction: float) -> float | None:
        """Returns the momentum, or Adam's first beta, after ``fraction`` of training; None to leave it alone."""
        return None

    def prepare(self, trainer: Trainer) -> None:
        """Prepares the curve, once its highest lr and the run's length are known."""

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

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks before ranks start that nothing else sets the lr.

        Args:
            trainer: Trainer of the run.
            module: Module of the run.
            datamodule: Datamodule of the run.

        Raises:
            DloError: A scheduler or another callback does.
        """
        self._check_alone(trainer, module, find_schedulers(module, trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that nothing else sets the lr, and finds each group's highest lr."""
        configs = trainer.lr_scheduler_configs
        self._check_alone(trainer, pl_module, [type(config.scheduler).__name__ for config in configs])
        name = type(self).__name__
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if not self._peaks:
            self._peaks = group_peaks([float(group["lr"]) for group in groups], self.max_lr)
        if len(self._peaks) != len(groups):
            raise DloError(
                f"{name}: max_lr must have one value for each of the {len(groups)} parameter groups, got"
                f" {len(self._peaks)}; set a single value to scale them all"
            )
        fraction_seen(trainer)  # Raises if training has no end.
        self.prepare(trainer)

    def _check_alone(self, trainer: Trainer, module: LightningModule, schedulers: list[str]) -> None:
        name = type(self).__name__
        if schedulers:
            has_option = "schedule" in inspect.signature(type(module).__init__).parameters
            raise DloError(
                f"{name}: {type(module).__name__} must configure no scheduler, as {name} sets the learning rate,"
                f" got {', '.join(schedulers)};"
                f" {'set model.init_args.schedule: constant' if has_option else 'remove one of them'}"
            )
        for one in callbacks_of(trainer):
            if isinstance(one, LearningRateSchedule) and one is not self:
                raise DloError(
                    f"{name}: one callback must set the learning rate, got {type(one).__name__} too; remove one of them"
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Sets the lr of the next optimizer step."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        fraction = fraction_seen(trainer)
        factor, momentum = self.lr_factor(fraction), self.momentum_at(fraction)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for group, peak in zip(groups, self._peaks, strict=True):
            group["lr"] = peak * factor
            if momentum is not None:
                if "betas" in group:
                    group["betas"] = (momentum, *group["betas"][1:])
                elif "momentum" in group:
                    group["momentum"] = momentum


def group_peaks(current: list[float], max_lr: float | list[float] | None) -> list[float]:
    """Returns the highest lr of each parameter group.

    Args:
        current: Groups' lr when the optimizer was built.
        max_lr: Highest lr as in :class:`LearningRateSchedule`.
    """
    if max_lr is None:
        return current
    if isinstance(max_lr, list):
        return list(max_lr)
    highest = max(current)
    return [max_lr * lr / highest for lr in current] if highest > 0 else [max_lr] * len(current)


#: Steps of a run whose data has not been read, for code that asks the trainer for them.
_STEPS = 1000


class _BeforeData:
    """Trainer whose number of steps is known without loading data."""

    estimated_stepping_batches = _STEPS
    num_training_batches = _STEPS

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def find_schedulers(module: Any, trainer: Any) -> list[str]:
    """Returns the class names of the schedulers that ``configure_optimizers`` makes.

    It is called on a copy with fake tensors. Where it fails there, because it needs values or the data, the answer is
    an empty list; the run's first step knows.

    Args:
        module: LightningModule of the run; it is not changed.
        trainer: Trainer of the run.
    """
    from dlo_framework.fake_kernels import FakeTensorMode

    with contextlib.suppress(Exception):  # Any code of a user's may fail without values or data.
        built = module.on_meta() if isinstance(module, Task) else module
        with FakeTensorMode(allow_non_fake_inputs=True):
            own = fake_copy(built)
            own._trainer = _BeforeData(trainer)
            configured = configured_schedulers(own.configure_optimizers())
            schedulers = [one["scheduler"] if isinstance(one, dict) else one for one in configured]
            return [type(scheduler).__name__ for scheduler in schedulers]
    return []


def configured_schedulers(configured: Any) -> list[Any]:
    """Returns the schedulers in one of the forms that ``configure_optimizers`` may return in Lightning."""
    if isinstance(configured, dict):
        return [configured["lr_scheduler"]] if configured.get("lr_scheduler") is not None else []
    if not isinstance(configured, list | tuple):
        return []
    if len(configured) == 2 and isinstance(configured[0], list | tuple):
        given = configured[1]
        return list(given) if isinstance(given, list | tuple) else [given]
    return [scheduler for one in configured for scheduler in configured_schedulers(one) if isinstance(one, dict)]


Decay = Literal["linear", "cosine", "sqrt", "exponential"]
CycleMode = Literal["triangular", "triangular2", "exp_range"]


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

    example = "{max_lr: 0.001}"

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

    example = "{max_lr: 0.001, cycles: 2}"

    def __init__(
        self,
        max_lr: float | list[float] | None = None,
        cycles: int = 4,
        ratio: float = 1.0,
        final: float = 0.0,
        peak_decay: float = 1.0,
    ) -> None:
        super().__init__(max_lr)
        check_number("WarmRestarts: cycles", cycles, "at least 1", "4 is the default")
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

    example = "{max_lr: 0.001, cycles: 2}"

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
        check_number("Cyclic: cycles", cycles, "at least 1", "4 is the default")
        check_choice("Cyclic: mode", mode, get_args(CycleMode), "leave it out")
        check_number("Cyclic: low", low, "at least 0 and below 1", "0.1 to 0.3 are usual")
        check_number("Cyclic: gamma", gamma, "above 0 and at most 1", "leave it out")
        self.cycles, self.low, self.mode, self.gamma, self.momentum = cycles, low, mode, gamma, momentum

    def _height(self, fraction: float) -> float:
        number, position = cycle_position(fraction, self.cycles)
        scale = {"triangular": 1.0, "triangular2": 0.5**number, "exp_range": self.gamma ** (100 * fraction)}[self.mode]
        return scale * (1 - abs(2 * position - 1))  # 0 at the ends of a cycle, and 1 in its middle.

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

    example = "{max_lr: 0.001, points: [0.0, 0.5]}"

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


def _check_peaks(what: str, final: float, peak_decay: float) -> None:
    check_number(f"{what}: peak_decay", peak_decay, "above 0 and at most 1", "leave it out")
    _check_final(what, final, "cosine")


def _check_final(what: str, final: float, shape: str) -> None:
    check_choice(f"{what}: shape", shape, get_args(Decay), "leave it out")
    least = "above 0" if shape == "exponential" else "at least 0"
    check_number(f"{what}: final", final, f"{least} and below 1", "0.1 is usual")


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

    example = "{max_lr: 0.001}"

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
