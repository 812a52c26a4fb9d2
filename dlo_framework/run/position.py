"""What callbacks that follow the run's position share: points of a run in a config, and hooks into the datamodule.

A point is in epochs, percent of the run, or samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dlo_framework.data import Position, ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.progress import epochs_of_run, fraction_seen

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


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
    found = _FORM.fullmatch(str(point).strip())
    if found is None:
        raise DloError(
            f"{what}: a point must be like 3, '3 epochs', '50%' or '500000 samples', got {point!r}; write it so"
        )
    value, unit = float(found[1].replace("_", "")), (found[2] or "epochs").lower()
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
