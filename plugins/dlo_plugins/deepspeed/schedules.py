"""The JSON's scheduler section as a scheduler of torch's kind, with the very curve of DeepSpeed's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim.lr_scheduler import LRScheduler

from dlo_framework.errors import DloError, did_you_mean, nearest
from dlo_plugins.deepspeed import curves
from dlo_plugins.deepspeed.paths import get

#: By the names of DeepSpeed's classes.
CURVES: dict[str, Callable[..., float]] = {
    "LRRangeTest": curves.lr_range_test,
    "OneCycle": curves.one_cycle,
    "WarmupLR": curves.warmup_lr,
    "WarmupDecayLR": curves.warmup_decay_lr,
    "WarmupCosineLR": curves.warmup_cosine_lr,
}

#: The second of Adam's betas under DeepSpeed's OneCycle.
_SECOND_BETA = 0.99


class DeepSpeedSchedule(LRScheduler):
    """A learning rate along one of DeepSpeed's curves, to be stepped after each optimizer step.

    Args:
        optimizer: its groups' rates, as they are now, are their base rates.
        name: of DeepSpeed's class, a key of :data:`CURVES`.
        arguments: of that class; one that is a list holds one value a parameter group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, arguments: Mapping[str, Any]) -> None:
        self.name, self.arguments = name, dict(arguments)
        self._cycles_momentum = (
            name == "OneCycle" and self.arguments.get("cycle_momentum", True) and "betas" in optimizer.defaults
        )
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns each group's rate; also sets the momentum, where the curve has one."""
        step = self.last_epoch - 1  # DeepSpeed counts the steps that are over from -1 on.
        if self._cycles_momentum:
            for number, group in enumerate(self.optimizer.param_groups):
                known = inspect.signature(curves.one_cycle_momentum).parameters
                own = {key: value for key, value in self._of_group(number).items() if key in known}
                group["betas"] = (curves.one_cycle_momentum(step, **own), _SECOND_BETA)
        curve = CURVES[self.name]
        return [curve(step, float(base), **self._of_group(number)) for number, base in enumerate(self.base_lrs)]

    def _of_group(self, number: int) -> dict[str, Any]:
        return {key: value[number] if isinstance(value, list) else value for key, value in self.arguments.items()}


def check_scheduler(config: Mapping[str, Any], source: str) -> None:
    """Checks the scheduler section: its type, and that it has the arguments.

    Raises:
        DloError: with the nearest name, for an unknown one.
    """
    if config.get("scheduler") is not None:
        _arguments(config["scheduler"], source)


def lengths_of(config: Mapping[str, Any], module: LightningModule, trainer: Trainer) -> dict[str, int]:
    """Returns what :func:`scheduler_of` fills an ``"auto"`` length with: of the run, and of the task's own warm-up.

    Only what the configuration leaves ``"auto"`` is asked for: the length of a run may need its data.

    Args:
        config: the configuration.
        module: whose `warmup_steps`, or `warmup_epochs`, say how long its own schedule warms up.
        trainer: of the run.
    """
    found: dict[str, int] = {}
    if get(config, "scheduler.params.total_num_steps") == "auto":
        steps = trainer.estimated_stepping_batches
        found |= {"total_steps": int(steps)} if 0 < steps < float("inf") else {}
    if get(config, "scheduler.params.warmup_num_steps") == "auto":
        found["warmup_steps"] = _own_warmup(module, trainer)
    return found


def _own_warmup(module: LightningModule, trainer: Trainer) -> int:
    steps, epochs = getattr(module, "warmup_steps", None), getattr(module, "warmup_epochs", None)
    if isinstance(steps, int):
        return steps
    if not epochs or trainer.estimated_stepping_batches < 1:  # It also makes the loaders, which know an epoch.
        return 0
    return round(epochs * trainer.num_training_batches / trainer.accumulate_grad_batches)


def scheduler_of(
    config: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
) -> LRScheduler | None:
    """Returns the JSON's scheduler, to be stepped after each optimizer step; None where it has none.

    Of what is ``"auto"``, ``total_num_steps`` is the run's number of steps, ``warmup_num_steps`` the task's own,
    ``warmup_max_lr`` the optimizer's rate, and all else the curve's default.

    Args:
        config: the configuration.
        optimizer: whose rate it sets.
        total_steps: optimizer steps of the run; see :func:`lengths_of`.
        warmup_steps: of the task's own schedule.

    Raises:
        DloError: for an unknown scheduler or argument, one that is missing, and an ``"auto"`` that nothing can fill.
    """
    section = config.get("scheduler")
    if section is None:
        return None
    source = getattr(config, "source", "strategy.config")
    name, arguments = _arguments(section, source)
    for key in [key for key, value in arguments.items() if value == "auto"]:
        del arguments[key]
        if key == "total_num_steps":
            if total_steps is None or not 0 < total_steps < float("inf"):
                raise DloError(
                    f'{source}: scheduler.params.total_num_steps is "auto", but the run has no end that is known; give'
                    " it in the JSON, or set --trainer.max_steps"
                )
            arguments[key] = int(total_steps)
        elif key == "warmup_max_lr":
            arguments[key] = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        elif key == "warmup_num_steps":
            if warmup_steps is None:
                raise DloError(
                    f'{source}: scheduler.params.warmup_num_steps is "auto", but nothing says how long the warm-up is;'
                    " give the number of optimizer steps"
                )
            arguments[key] = max(1, warmup_steps)
    for key, value in arguments.items():
        if isinstance(value, list) and name in CURVES and len(value) != len(optimizer.param_groups):
            raise DloError(
                f"{source}: scheduler.params.{key} has {len(value)} values, but the optimizer has"
                f" {len(optimizer.param_groups)} parameter groups; give one value, or as many"
            )
    if name in CURVES:
        return DeepSpeedSchedule(optimizer, name, arguments)
    found: LRScheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
    return found


def _arguments(section: Any, source: str) -> tuple[str, dict[str, Any]]:
    """Returns the type and the arguments of a scheduler section, checked by name."""
    name = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        raise DloError(f'{source}: scheduler needs a type, such as "type": "WarmupDecayLR", but was {section!r}')
    arguments = {key: value for key, value in (section.get("params") or {}).items() if key != "last_batch_iteration"}
    available = [*CURVES, *_torch_names()]
    if name not in available:
        raise DloError(
            f"{source}: unknown scheduler.type '{name}'{did_you_mean(name, available) or ';'} available:"
            f" {', '.join(available)}"
        )
    target = CURVES.get(name) or getattr(torch.optim.lr_scheduler, name)
    parameters = inspect.signature(target).parameters
    known = [key for key in parameters if key not in ("self", "optimizer", "step", "base", "last_epoch")]
    for key in arguments:
        if key not in known:
            hint = did_you_mean(key, known) if nearest(key, known) else f"; known: {', '.join(known)}"
            raise DloError(f"{source}: unknown key 'scheduler.params.{key}' of {name}{hint}")
    missing = [key for key in known if parameters[key].default is inspect.Parameter.empty and key not in arguments]
    if missing:
        raise DloError(f"{source}: scheduler.params of {name} needs {' and '.join(missing)}")
    _check_steps(arguments, source)
    return name, arguments


def _check_steps(arguments: Mapping[str, Any], source: str) -> None:
    for key in ("warmup_num_steps", "lr_range_test_step_size", "cycle_first_step_size", "total_num_steps"):
        value = arguments.get(key, 1)
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise DloError(f"{source}: scheduler.params.{key} is a number of steps from 1 on, but was {value!r}")
    if arguments.get("warmup_type", "log") not in ("log", "linear", "auto"):
        raise DloError(f"{source}: scheduler.params.warmup_type is log or linear, but was {arguments['warmup_type']!r}")


def _torch_names() -> list[str]:
    """Returns torch's schedulers that JSON can describe: DeepSpeed takes the names that it does not know from there."""
    return [
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "ExponentialLR",
        "LinearLR",
        "MultiStepLR",
        "OneCycleLR",
        "PolynomialLR",
        "StepLR",
    ]
