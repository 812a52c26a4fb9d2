"""Progress of a run, as the fraction of its samples that it has seen, and its windows of gradient accumulation.

Schedules index this fraction and not a count of steps, so that gradient accumulation, a changing batch size and a
resume do not shift them. It is computed from the trainer's counters, in batches, so that the loaders need not be built
to know the number of steps (Lightning issue #20550); if the batch size changes within an epoch, it is computed from the
plan of its batches.

Callbacks that follow the run's position share points of a run in a config, which are in epochs, percent of the run, or
samples, and hooks into the datamodule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from dlo_framework.callback import PluginCallback
from dlo_framework.data import Position, ResumableDataModule
from dlo_framework.data.description import LoaderDescription
from dlo_framework.data.sampler import ResumableBatchSampler
from dlo_framework.errors import DloError
from dlo_framework.optimizers import multiply_all

if TYPE_CHECKING:
    from dlo_framework.data.sampler import Span


def fraction_seen(trainer: Trainer, *, with_this_batch: bool = False) -> float:
    """Returns the fraction of training, 0 to 1, before the current batch.

    It is the larger of the fraction of ``max_epochs`` and the fraction of ``max_steps``, of those that are set.

    Args:
        trainer: Trainer, in ``on_train_batch_start`` or later in the same batch.
        with_this_batch: Whether to count that batch too, as a torch scheduler needs, which steps after it.

    Raises:
        DloError: if neither is set; if ``max_epochs`` alone is, and the loader does not say how long an epoch is.
    """
    check_end(trainer)
    loaded = trainer.train_dataloader is not None
    if loaded and trainer.max_steps < 0 and math.isinf(trainer.num_training_batches):
        raise DloError(
            "a schedule needs the fraction of training that is done, and the training loader has no length;"
            " set trainer.max_steps, or trainer.limit_train_batches to the batches of an epoch"
        )
    return fraction_at(trainer, epochs_seen(trainer, with_this_batch=with_this_batch), trainer.global_step)


def fraction_at(trainer: Trainer, epochs: float, steps: float) -> float:
    """Returns the fraction of training, 0 to 1, before a position.

    Args:
        trainer: Trainer of the run.
        epochs: Number of epochs before the position.
        steps: Number of optimizer steps before the position.

    Raises:
        DloError: if neither ``max_epochs`` nor ``max_steps`` is set.
    """
    check_end(trainer)
    ends = ((epochs, epochs_of_run(trainer)), (steps, trainer.max_steps if trainer.max_steps >= 0 else math.inf))
    return min(1.0, max(seen / end if end else 1.0 for seen, end in ends))


def check_end(trainer: Trainer) -> None:
    """Checks that training ends.

    Raises:
        DloError: if neither ``max_epochs`` nor ``max_steps`` is set.
    """
    if math.isinf(epochs_of_run(trainer)) and trainer.max_steps < 0:
        raise DloError(
            "trainer.max_epochs or trainer.max_steps must be set for a schedule, got neither; set one of them, or"
            " remove the schedule (of a task: schedule: constant)"
        )


def epochs_of_run(trainer: Trainer) -> float:
    """Returns ``max_epochs``, infinity if it is -1 or None; ``max_steps`` may end the run earlier."""
    return math.inf if trainer.max_epochs is None or trainer.max_epochs < 0 else trainer.max_epochs


def epochs_seen(trainer: Trainer, *, with_this_batch: bool = False) -> float:
    """Returns the number of epochs before the current batch, with the fraction of this one.

    Args:
        trainer: Trainer, as in :func:`fraction_seen`.
        with_this_batch: Whether to count that batch too.
    """
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return trainer.current_epoch + _within_epoch(trainer, ready if with_this_batch else max(0, ready - 1))


def _within_epoch(trainer: Trainer, done: int) -> float:
    """Returns the fraction of the epoch in its first ``done`` batches."""
    spans = planned_batches(trainer)
    if spans:
        return (spans[done].start if done < len(spans) else spans[-1].stop) / spans[-1].stop
    batches = trainer.num_training_batches
    return done / batches if batches and math.isfinite(batches) else 0.0


def loader_batch_size(trainer: Trainer) -> int | None:
    """Returns the samples of a rank's batch by the training loader; None if the loader does not say."""
    size = getattr(trainer.train_dataloader, "batch_size", None)
    return size if isinstance(size, int) else None


def planned_batches(trainer: Trainer) -> list[Span] | None:
    """Returns the batches of the current epoch if the loader plans batches of changing size, else None."""
    sampler = LoaderDescription(trainer.train_dataloader).batch_sampler
    return sampler.planned() if isinstance(sampler, ResumableBatchSampler) and sampler.window_at is not None else None


class AccumulationWindow(int):
    """Number of batches in this optimizer step, counted from the batch at which it began.

    Lightning ends a step where ``batches_of_this_epoch % trainer.accumulate_grad_batches`` is 0. As that attribute,
    this number gives the right result for windows that differ in length and begin anywhere in the epoch.

    Attributes:
        start: Number of the epoch's batches before the window.
        usual: Number of batches in this epoch's usual step: with windows that are cut short at its end the length of
            the others, with windows that differ by plan the mean.
    """

    start: int
    usual: Fraction

    def __new__(cls, batches: int, start: int, usual: Fraction | int | None = None) -> AccumulationWindow:
        """Returns ``batches``, with the start of the window; ``usual`` defaults to ``batches``."""
        window = super().__new__(cls, batches)
        window.start, window.usual = start, Fraction(batches if usual is None else usual)
        return window

    def __rmod__(self, ready: int) -> int:
        return (ready - self.start) % int(self)

    def __getnewargs__(self) -> tuple[int, int, Fraction]:  # type: ignore[override]
        return int(self), self.start, self.usual


def refresh_epoch_length(trainer: Trainer) -> None:
    """Sets the number of batches that Lightning expects in the new epoch to the loader's current length.

    For ``on_train_start`` and ``on_train_epoch_start``. Lightning (2.6) reads the length once, when it sets the loader
    up, and has no public method to update it but to build the loader, and its workers, again: this function changes its
    private ``_combined_loader`` and ``_data_fetcher`` as ``FitLoop.setup_data`` does.
    """
    loop: Any = trainer.fit_loop
    loader, fetcher = loop._combined_loader, loop._data_fetcher
    lengths = [len(part) for part in loader.flattened]
    loader.limits[:] = lengths  # In place: the existing iterator holds the same list.
    loop.max_batches = fetcher.length = max(lengths)
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def steps_per_epoch(trainer: Trainer) -> float:
    """Returns the optimizer steps of the current epoch; infinity if the loader has no length."""
    batches, window = trainer.num_training_batches, trainer.accumulate_grad_batches
    usual = window.usual if isinstance(window, AccumulationWindow) else window
    return math.ceil(int(batches) / Fraction(usual)) if math.isfinite(batches) else math.inf


def optimizer_steps(trainer: Trainer) -> float:
    """Returns the optimizer steps of the full run; infinity if neither loader nor trainer limits them."""
    steps, epochs = trainer.max_steps if trainer.max_steps >= 0 else math.inf, epochs_of_run(trainer)
    return min(steps_per_epoch(trainer) * epochs if epochs else 0, steps)


def count_batches(trainer: Trainer) -> int | None:
    """Returns the number of batches of the full run, by its epochs or its steps; None if neither is known."""
    per_epoch, ends = trainer.num_training_batches, []
    done = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and per_epoch != float("inf"):
        ends.append(trainer.max_epochs * int(per_epoch))
    if trainer.max_steps > 0 and trainer.global_step:
        ends.append(trainer.max_steps * done // trainer.global_step)
    return min(ends, default=None)


# --- accumulation --------------------------------------------------------------------------------------------


class AccumulationTail(PluginCallback):
    """Makes the last gradient of an epoch the mean over its own batches; on by default.

    Lightning (2.6) divides each loss by ``accumulate_grad_batches``, also if the epoch ends in the middle of a window:
    with 10 batches and 4 of them to a step, the last gradient is half of what it should be. Here the divisor is the
    window's real length. Each batch of a window has the same weight, however many samples it has. The callback must
    precede callbacks that change gradients, as in every ``dlo fit``: if the loader has no length, it scales the last
    gradient up.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(self) -> None:
        self._size = 1
        self._window: AccumulationWindow | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Sets Lightning's window length to that of the batch's window."""
        set_by = trainer.accumulate_grad_batches
        if set_by is not self._window:
            if isinstance(set_by, AccumulationWindow):
                return  # Another callback plans the windows: DynamicBatchSize.
            self._size = set_by
        start, length = find_window(batch_idx, self._size, trainer.num_training_batches)
        if length == self._size:
            trainer.accumulate_grad_batches, self._window = self._size, None
        elif self._window is None or self._window.start != start:
            trainer.accumulate_grad_batches = self._window = AccumulationWindow(length, start, self._size)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Scales up the gradient of a last window that turns out short, because the loader has no length."""
        size = trainer.accumulate_grad_batches
        if isinstance(size, AccumulationWindow) or size == 1 or not pl_module.automatic_optimization:
            return
        batches = (trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1) % size + 1
        if batches < size:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if gradients:  # None where StochasticWeightAveraging (Lightning 2.6) renews statistics in a last pass.
                multiply_all(gradients, size / batches)

    def _release(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Restores the number that the user set, also after an exception in an earlier fit."""
        if self._window is not None and trainer.accumulate_grad_batches is self._window:
            trainer.accumulate_grad_batches = self._size
        self._window = None

    setup = on_train_epoch_end = _release


def find_window(batch: int, size: int, batches: float) -> tuple[int, int]:
    """Returns the accumulation window of a batch: its first batch, and its number of batches.

    Args:
        batch: Index of the batch in the epoch, from 0.
        size: Number of batches in all windows but the last.
        batches: Number of batches in the epoch; infinity if unknown.
    """
    start = batch - batch % size
    return start, size if math.isinf(batches) else min(size, int(batches) - start)


Value = TypeVar("Value")

_FORM = re.compile(r"(\d+(?:[._]\d+)*(?:e\d+)?)\s*(%|epochs?|samples?)?", re.IGNORECASE)


@dataclass(frozen=True)
class RunPosition:
    """Point of a run.

    Attributes:
        value: Number of units before the point.
        unit: Unit: ``epochs``, ``runs`` (the value is then a fraction, 0 to 1) or ``samples`` of all ranks.
    """

    value: float
    unit: Literal["epochs", "runs", "samples"]

    def reached(self, at: Position, max_epochs: float) -> bool:
        """Returns whether a batch that begins at ``at`` is at this point or after it."""
        return self.distance(at, max_epochs) >= 0

    def distance(self, at: Position, max_epochs: float) -> float:
        """Returns the distance from this point to ``at`` in the point's unit; negative before the point."""
        if self.unit == "samples":
            return at.epoch * at.size + at.samples - self.value
        return at.epochs - self.value * (max_epochs if self.unit == "runs" else 1.0)

    def __str__(self) -> str:
        return f"{self.value:.0%}" if self.unit == "runs" else f"{self.value:g} {self.unit}"

    def epochs(self, size: int, max_epochs: float) -> float:
        """Returns the point in epochs of ``size`` samples, in a run of ``max_epochs``."""
        return self.value * {"epochs": 1.0, "runs": max_epochs, "samples": 1 / size}[self.unit]


def parse_position(
    point: str | int | float, what: str, *, in_samples: bool = True, at_zero: bool = True
) -> RunPosition:
    """Returns the point for a config's value: ``3`` or ``"3 epochs"``, ``"50%"``, ``"500_000 samples"``.

    Args:
        point: Value of the config; a number without a unit counts epochs.
        what: Name of the option, for the message.
        in_samples: Whether the option takes samples.
        at_zero: Whether the option takes the run's start.

    Raises:
        DloError: If it has another form, is a percentage above 100, or one that the option does not take.
    """
    match = _FORM.fullmatch(str(point).strip())
    if match is None:
        raise DloError(
            f"{what}: a point must be like 3, '3 epochs', '50%' or '500000 samples', got {point!r}; write it so"
        )
    value, unit = float(match[1].replace("_", "")), (match[2] or "epochs").lower()
    if unit == "%" and value > 100:
        raise DloError(f"{what}: a point must be within the run, got {point!r}; set '100%' or less")
    if unit.startswith("sample") and not in_samples:
        raise DloError(f"{what} must be in epochs or percent, got {point!r}; write '10%' or '3 epochs'")
    if not value and not at_zero:
        raise DloError(f"{what} must be above 0, got {point!r}; write '50%' or '1 epochs'")
    if unit == "%":
        return RunPosition(value / 100, "runs")
    return RunPosition(value, "samples" if unit.startswith("sample") else "epochs")


def any_percentage(points: Iterable[RunPosition]) -> bool:
    """Returns whether any point is a percentage of the run."""
    return any(point.unit == "runs" for point in points)


def check_max_epochs(points: list[RunPosition], max_epochs: int | None, what: str) -> float:
    """Returns the number of epochs of the run; infinite if ``trainer.max_epochs`` is not set and no point needs it.

    Raises:
        DloError: If a point is a percentage and ``trainer.max_epochs`` is not set.
    """
    if max_epochs is not None and max_epochs >= 0:
        return float(max_epochs)
    if any_percentage(points):
        raise DloError(
            f"{what}: trainer.max_epochs must be set for a point in percent, got {max_epochs}; set it, or use epochs or"
            " samples"
        )
    return float("inf")


def value_at(steps: Mapping[RunPosition, Value], at: Position, max_epochs: float) -> Value | None:
    """Returns the value of the last point that ``at`` has reached, in the order of the run; None before the first."""
    in_order = sorted(steps, key=lambda point: point.epochs(at.size, max_epochs))
    reached = [point for point in in_order if point.reached(at, max_epochs)]
    return steps[reached[-1]] if reached else None


def run_fraction(trainer: Trainer, point: RunPosition, what: str, key: str) -> float:
    """Returns a point in epochs or percent as a fraction of the run.

    Args:
        trainer: Trainer of the run.
        point: Point; not in samples.
        what: Name of the callback, for the message.
        key: Name of the option.

    Raises:
        DloError: If the point is in epochs, and ``trainer.max_epochs`` is not set.
    """
    if point.unit == "runs":
        return point.value
    if epochs_of_run(trainer) in (0, float("inf")):
        raise DloError(
            f"{what}: trainer.max_epochs must be set for {key} in epochs, got none; set it, or use a percentage"
        )
    return point.value / epochs_of_run(trainer)


class StepFraction:
    """Fraction of training before an optimizer step, read once a step.

    Attributes:
        step: Number of optimizer steps before it; -1 before the first.
        fraction: Fraction of training, 0 to 1.
    """

    def __init__(self) -> None:
        self.step, self.fraction = -1, 0.0

    def update(self, trainer: Trainer, *, with_this_batch: bool = False) -> bool:
        """Reads the progress at a step's first micro-batch; returns whether this batch is one.

        Args:
            trainer: Trainer.
            with_this_batch: Whether the trainer has not counted the batch yet; it has in ``on_train_batch_start``.
        """
        if trainer.global_step == self.step:
            return False
        self.step, self.fraction = trainer.global_step, fraction_seen(trainer, with_this_batch=with_this_batch)
        return True


class FollowsSteps:
    """Base of callbacks whose state is the progress at the last step."""

    def __init__(self) -> None:
        self._clock = StepFraction()

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress at the last step."""
        return {"step": self._clock.step, "fraction": self._clock.fraction}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the progress at the last step."""
        self._clock.step, self._clock.fraction = state_dict["step"], state_dict["fraction"]


class DataHook:
    """Function in an attribute of a datamodule, of which a run has one.

    A callback calls :meth:`set` in ``setup``, and :meth:`remove` in ``teardown`` and in ``on_exception``, as Lightning
    calls no ``teardown`` after an exception.

    Args:
        attribute: Name of the attribute, such as `order_at`.
        callback: Name of the callback, for errors.
        purpose: Verb and object of what the function does, for errors.
    """

    def __init__(self, attribute: str, callback: str, purpose: str) -> None:
        self._attribute, self._callback, self._purpose = attribute, callback, purpose
        self._datamodule: ResumableDataModule | None = None

    @property
    def is_set(self) -> bool:
        """Whether the function is in a datamodule."""
        return self._datamodule is not None

    def set(self, datamodule: ResumableDataModule, function: Callable[..., Any]) -> None:
        """Sets the function.

        Raises:
            DloError: If another callback has set one.
        """
        if getattr(datamodule, self._attribute) is not None:
            raise DloError(f"{self._callback}: only one callback must {self._purpose}, got two; remove one of them")
        setattr(datamodule, self._attribute, function)
        self._datamodule = datamodule

    def remove(self) -> None:
        """Removes the function, if it is set."""
        if self._datamodule is not None:
            setattr(self._datamodule, self._attribute, None)
        self._datamodule = None
