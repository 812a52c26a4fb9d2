"""Translation of the JSON's scheduler section to a torch LRScheduler with DeepSpeed's exact curve."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim.lr_scheduler import LRScheduler

from dlo_framework.errors import DloError, did_you_mean, nearest
from dlo_plugins.deepspeed import curves
from dlo_plugins.deepspeed.nested_paths import get

#: Curves by the names of DeepSpeed's classes.
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
    """LRScheduler along one of DeepSpeed's curves, to be stepped after each optimizer step.

    Args:
        optimizer: Optimizer whose current rates are the base rates.
        name: Name of DeepSpeed's class, a key of :data:`CURVES`.
        arguments: Arguments of that class; a list has one value per parameter group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, arguments: Mapping[str, Any]) -> None:
        self.name, self.arguments = name, dict(arguments)
        self._cycles_momentum = (
            name == "OneCycle" and self.arguments.get("cycle_momentum", True) and "betas" in optimizer.defaults
        )
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Returns each group's rate; also sets the momentum, if the curve has one."""
        step = self.last_epoch - 1  # DeepSpeed counts completed steps from -1.
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
    """Checks the type and the arguments of the scheduler section.

    Raises:
        DloError: If a name is unknown; the message has the nearest one.
    """
    if config.get("scheduler") is not None:
        _arguments(config["scheduler"], source)


def compute_lengths(config: Mapping[str, Any], module: LightningModule, trainer: Trainer) -> dict[str, int]:
    """Returns the lengths with which :func:`build_scheduler` fills in ``"auto"``: of the run, and of the task's
    warm-up.

    Only the lengths that the configuration needs are computed: the length of a run may need its data.

    Args:
        config: DeepSpeed configuration.
        module: Task whose `warmup_steps` or `warmup_epochs` give the length of its own warm-up.
        trainer: Trainer of the run.
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
    if not epochs or trainer.estimated_stepping_batches < 1:  # It also builds the loaders.
        return 0
    return round(epochs * trainer.num_training_batches / trainer.accumulate_grad_batches)


def build_scheduler(
    config: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    total_steps: int | None = None,
    warmup_steps: int | None = None,
) -> LRScheduler | None:
    """Returns the JSON's scheduler, to be stepped after each optimizer step; None if it has none.

    ``"auto"`` becomes the run's number of steps for ``total_num_steps``, the task's own warm-up for
    ``warmup_num_steps``, the optimizer's rate for ``warmup_max_lr``, and the curve's default for all others.

    Args:
        config: DeepSpeed configuration.
        optimizer: Optimizer whose rate it sets.
        total_steps: Number of optimizer steps of the run; see :func:`compute_lengths`.
        warmup_steps: Number of warm-up steps of the task's own schedule.

    Raises:
        DloError: If the scheduler or an argument is unknown or missing, or an ``"auto"`` cannot be filled in.
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
                    f"{source}: scheduler.params.total_num_steps must be a number if the run has no known end, got"
                    ' "auto"; set it in the JSON, or set --trainer.max_steps'
                )
            arguments[key] = int(total_steps)
        elif key == "warmup_max_lr":
            arguments[key] = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        elif key == "warmup_num_steps":
            if warmup_steps is None:
                raise DloError(
                    f"{source}: scheduler.params.warmup_num_steps must be a number if the task sets no warm-up, got"
                    ' "auto"; set the number of optimizer steps'
                )
            arguments[key] = max(1, warmup_steps)
    for key, value in arguments.items():
        if isinstance(value, list) and name in CURVES and len(value) != len(optimizer.param_groups):
            raise DloError(
                f"{source}: scheduler.params.{key} must have one value, or one for each of the optimizer's"
                f" {len(optimizer.param_groups)} parameter groups, got {len(value)} values; set one value"
            )
    if name in CURVES:
        return DeepSpeedSchedule(optimizer, name, arguments)
    found: LRScheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
    return found


def _arguments(section: Any, source: str) -> tuple[str, dict[str, Any]]:
    """Returns the type and the arguments of a scheduler section, after a check of their names."""
    name = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        raise DloError(f'{source}: scheduler must have a type, such as "type": "WarmupDecayLR", got {section!r}')
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
        raise DloError(f"{source}: scheduler.params of {name} must have {' and '.join(missing)}, got none; add it")
    _check_steps(arguments, source)
    return name, arguments


def _check_steps(arguments: Mapping[str, Any], source: str) -> None:
    for key in ("warmup_num_steps", "lr_range_test_step_size", "cycle_first_step_size", "total_num_steps"):
        value = arguments.get(key, 1)
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise DloError(f"{source}: scheduler.params.{key} must be an integer of at least 1, got {value!r}")
    if arguments.get("warmup_type", "log") not in ("log", "linear", "auto"):
        kind = arguments["warmup_type"]
        raise DloError(f"{source}: scheduler.params.warmup_type must be log or linear, got {kind!r}")


def _torch_names() -> list[str]:
    """Returns the supported schedulers of torch: DeepSpeed looks up names there that it does not know."""
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
