"""Finds the learning-rate schedulers that a module configures, before ranks start."""

from __future__ import annotations

import contextlib
from typing import Any

from dlo_framework.fake_kernels import fake_copy
from dlo_framework.task import Task

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
    from torch._subclasses.fake_tensor import FakeTensorMode

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
