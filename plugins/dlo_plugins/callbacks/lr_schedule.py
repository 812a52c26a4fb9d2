"""Base of callbacks that set the learning rate from the fraction of training that is done."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import fake_copy
from dlo_framework.progress import fraction_seen
from dlo_framework.task import Task


class LearningRateSchedule(Callback, ABC):
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
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for one in callbacks:
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
            return [_name(scheduler) for scheduler in _schedulers(own.configure_optimizers())]
    return []


def _schedulers(configured: Any) -> list[Any]:
    """Returns the schedulers in one of the forms that ``configure_optimizers`` may return in Lightning."""
    if isinstance(configured, dict):
        return [configured["lr_scheduler"]] if configured.get("lr_scheduler") is not None else []
    if not isinstance(configured, list | tuple):
        return []
    if len(configured) == 2 and isinstance(configured[0], list | tuple):
        given = configured[1]
        return list(given) if isinstance(given, list | tuple) else [given]
    return [scheduler for one in configured for scheduler in _schedulers(one) if isinstance(one, dict)]


def _name(scheduler: Any) -> str:
    return type(scheduler["scheduler"] if isinstance(scheduler, dict) else scheduler).__name__
