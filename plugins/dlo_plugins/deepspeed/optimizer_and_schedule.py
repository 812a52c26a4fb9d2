"""Translation of the JSON's optimizer and scheduler sections to an optimizer and an LRScheduler.

DeepSpeed builds its own optimizers: FusedAdam on CUDA, and with offload a CPUAdam that is compiled on first use. dlo
builds the optimizer itself, so that checkpoints have its state by name and every strategy can read it. The classes here
compute the same step. The rates of a schedule are those of DeepSpeed's classes
(``deepspeed.runtime.lr_schedules``, 0.19.8), which are not LRSchedulers of torch and save only their step.

DeepSpeed's Adam without bias correction, and its Lamb, are in no other library; their steps are those of DeepSpeed
0.19.8's kernels (``csrc/adam``, ``csrc/lamb``), in torch's operators on any device. Adam: A Method for Stochastic
Optimization. Kingma and Ba, 2014, arXiv 1412.6980. Large Batch Optimization for Deep Learning: Training BERT in 76
minutes. You et al., 2019, arXiv 1904.00962. Departures of DeepSpeed's Lamb from the paper: the trust ratio has bounds,
and the bias correction scales the step, not the update whose norm the ratio has.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from dlo_framework.data.description import ModuleDescription
from dlo_framework.errors import DloError, did_you_mean, nearest, unknown_hint
from dlo_framework.optimizers import PerParameterOptimizer, trust_ratio
from dlo_plugins.deepspeed.json_file import get, get_source, get_stage, import_config_module

#: Defaults of DeepSpeed's own optimizers, where the replacing class has others.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "lamb": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
}

#: Arguments that only choose which of DeepSpeed's implementations computes the step, or that are handled apart, with
#: the value that they must have where others would change the mathematics.
_IMPLEMENTATION: dict[str, dict[str, Any]] = {
    "adam": {"torch_adam": None, "adam_w_mode": None, "fp32_optimizer_states": True, "bias_correction": None},
    "lamb": {"max_grad_norm": None},
}

#: Optimizers of DeepSpeed that dlo does not support, with the reason.
_REFUSED = {
    "muadam": "which needs the package mup",
    "muadamw": "which needs the package mup",
    "musgd": "which needs the package mup",
    "muon": "which needs each parameter marked",
}


def check_optimizer(config: Mapping[str, Any], source: str) -> None:
    """Checks that the optimizer section has a supported optimizer and valid arguments.

    Raises:
        DloError: If the name is unknown; the message has the nearest one.
    """
    section = config.get("optimizer")
    if section is not None:
        _translate(section, source)
    if _kind(section) == "lamb" and get_stage(config) > 0:
        raise DloError(
            f"{source}: optimizer.type must be elementwise under ZeRO stages 1 to 3, which step flat slices of"
            ' parameters, got Lamb, which needs their norms; set "zero_optimization": {"stage": 0}, or use AdamW'
        )


def make_optimizer_args(
    config: Mapping[str, Any], own: torch.optim.Optimizer | None = None
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Returns the class and the arguments of the JSON's optimizer; None to use the task's own.

    Args:
        config: DeepSpeed configuration.
        own: Optimizer of the task, whose first parameter group fills in ``"auto"`` values.

    Raises:
        DloError: If the optimizer or an argument is unknown, or the task's optimizer cannot fill in an ``"auto"``.
    """
    section = config.get("optimizer")
    if section is None:
        return None
    source = get_source(config)
    kind, arguments = _translate(section, source)
    held = own.param_groups[0] if own is not None and own.param_groups else {}
    for name in [name for name, value in arguments.items() if value == "auto"]:
        if name not in held:
            raise DloError(
                f'{source}: optimizer.params.{name} must be a number, got "auto", which the task\'s optimizer'
                f" {type(own).__name__ + ' ' if own is not None else ''}cannot fill in; set it in the JSON"
            )
        arguments[name] = held[name]
    return kind, arguments


def _kind(section: Any) -> str:
    """Returns `adam`, `lamb` or `lion`, or the lower-case name of torch's class."""
    name = str(section.get("type", "")).lower() if isinstance(section, Mapping) else ""
    return "adam" if name == "adamw" else name


def _translate(section: Any, source: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Returns the class and the arguments of a section; arguments of ``"auto"`` are kept."""
    name = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        raise DloError(f'{source}: optimizer must have a type, such as "type": "AdamW", got {section!r}')
    given = dict(section.get("params") or {})
    is_off = _kind(section) == "lamb" and given.get("max_grad_norm") in (None, 0, "auto")
    if "max_grad_norm" in given and not is_off:
        raise DloError(
            f"{source}: optimizer.params.max_grad_norm must be unset, got {given['max_grad_norm']}; leave it out and"
            f' set "gradient_clipping": {given["max_grad_norm"]}'
        )
    if name.lower() in _REFUSED:
        raise DloError(
            f"{source}: optimizer.type must be an optimizer of torch or timm, got {name}, {_REFUSED[name.lower()]};"
            " leave the section out to use the task's optimizer"
        )
    kind = _kind(section)
    cls = _class_of(kind, given, name, source)
    arguments = {**_DEFAULTS.get(kind, {}), **given}
    if kind == "adam" and given.get("torch_adam") is True:
        arguments = given  # torch's own, with torch's defaults
    if cls is UncorrectedAdam:
        arguments["decoupled"] = not _is_coupled(name, given)
    for implementation, only in _IMPLEMENTATION.get(kind, {}).items():
        value = arguments.pop(implementation, None)
        if only is not None and value not in (None, "auto", only):
            raise DloError(
                f"{source}: optimizer.params.{implementation} must be {only}, as in dlo's {cls.__name__}, got {value};"
                " leave it out"
            )
    _check_arguments(cls, arguments, sorted(_IMPLEMENTATION.get(kind, ())), name, source)
    return cls, {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def _class_of(kind: str, given: Mapping[str, Any], name: str, source: str) -> type[torch.optim.Optimizer]:
    if kind == "adam":
        # torch's own, with `torch_adam`, has no such argument: DeepSpeed drops it.
        if given.get("bias_correction", True) is False and given.get("torch_adam") is not True:
            return UncorrectedAdam
        return torch.optim.Adam if _is_coupled(name, given) else torch.optim.AdamW
    if kind == "lamb":
        return DeepSpeedLamb
    if kind == "lion":
        import timm.optim

        lion: type[torch.optim.Optimizer] = timm.optim.Lion
        return lion
    known = _torch_classes()
    if kind not in known:
        names = sorted({"AdamW", "Adam", "Lamb", "Lion", *(cls.__name__ for cls in known.values())})
        raise DloError(f"{source}: unknown optimizer.type '{name}'{unknown_hint(name, names)}")
    return known[kind]


def _is_coupled(name: str, given: Mapping[str, Any]) -> bool:
    """Returns whether the weight decay is part of the gradient: DeepSpeed's Adam decouples it, as AdamW does."""
    return name.lower() == "adam" and given.get("adam_w_mode", True) is False


def _torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Returns torch's optimizers by lower-case name: DeepSpeed looks up names there that it does not know."""
    classes = {name: value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    # LBFGS needs a closure, SparseAdam sparse gradients, Muon matrices.
    left_out = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
    return {name.lower(): value for name, value in classes.items() if name not in left_out}


def _check_arguments(cls: type, arguments: Mapping[str, Any], others: list[str], name: str, source: str) -> None:
    own = [parameter for parameter in inspect.signature(cls).parameters if parameter not in ("self", "params")]
    known = [*own, *others]
    for argument, value in arguments.items():
        if argument not in known:
            hint = did_you_mean(argument, known) if nearest(argument, known) else f"; known: {', '.join(known)}"
            raise DloError(f"{source}: unknown key 'optimizer.params.{argument}' of {name}{hint}")
        if isinstance(value, str) and value != "auto":
            raise DloError(
                f"{source}: optimizer.params.{argument} must be a number, got the text {value!r}; write 0.001 or 1.0e-3"
            )


# --- schedule ----------------------------------------------------------------------------------------------

#: DeepSpeed's schedules.
CURVES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

#: Supported schedules of torch: DeepSpeed looks up names there that it does not know.
_TORCH_SCHEDULES = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
)


class DeepSpeedSchedule(LRScheduler):
    """LRScheduler with the rates of one of DeepSpeed's schedules, to be stepped after each optimizer step.

    Args:
        optimizer: Optimizer whose current rates are the base rates.
        name: Name of DeepSpeed's class, one of :data:`CURVES`.
        arguments: Arguments of that class; a list has one value per parameter group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str, arguments: Mapping[str, Any]) -> None:
        self.name, self.arguments = name, dict(arguments)
        self._cycles_momentum = (
            name == "OneCycle" and self.arguments.get("cycle_momentum", True) and "betas" in optimizer.defaults
        )
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Returns each group's rate; also sets the momentum, if the schedule has one."""
        rates = []
        for number, (group, base) in enumerate(zip(self.optimizer.param_groups, self.base_lrs, strict=True)):
            own = {key: value[number] if isinstance(value, list) else value for key, value in self.arguments.items()}
            # DeepSpeed counts completed steps from -1.
            there = _deepspeed_group(self.name, own, float(base), self.last_epoch - 1)
            rates.append(there["lr"])
            if self._cycles_momentum:
                group["betas"] = there["betas"]
        return rates


def _deepspeed_group(name: str, arguments: Mapping[str, Any], base: float, step: int) -> dict[str, Any]:
    """Returns a parameter group, with the `lr` and `betas` that a DeepSpeed schedule sets at a step (50 us).

    Args:
        name: Name of DeepSpeed's class.
        arguments: Arguments of the class.
        base: Rate of the group before the schedule starts.
        step: DeepSpeed's ``last_batch_iteration``: -1 for the first optimizer step, 0 for the next.
    """
    from deepspeed.utils import logger

    placeholder, level = torch.optim.AdamW([torch.zeros(1)], lr=base), logger.level
    logger.setLevel(logging.ERROR)  # Each schedule warns at its start, and at its end before its warm-up's.
    try:
        schedule = _deepspeed_class(name)(placeholder, **arguments)  # It sets the rate of step -1.
    finally:
        logger.setLevel(level)
    if step >= 0:
        schedule.step(step)
    return placeholder.param_groups[0]


@functools.cache
def _deepspeed_class(name: str) -> Any:
    """Returns a schedule's class; once ``schema.py`` has imported DeepSpeed's configuration, this takes no time."""
    import_config_module()
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, name)


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
    lengths: dict[str, int] = {}
    if get(config, "scheduler.params.total_num_steps") == "auto":
        steps = trainer.estimated_stepping_batches
        lengths |= {"total_steps": int(steps)} if 0 < steps < float("inf") else {}
    if get(config, "scheduler.params.warmup_num_steps") == "auto":
        lengths["warmup_steps"] = _own_warmup(module, trainer)
    return lengths


def _own_warmup(module: LightningModule, trainer: Trainer) -> int:
    task = ModuleDescription(module)
    if task.warmup_steps is not None:
        return task.warmup_steps
    if not task.warmup_epochs or trainer.estimated_stepping_batches < 1:  # It also builds the loaders.
        return 0
    return round(task.warmup_epochs * trainer.num_training_batches / trainer.accumulate_grad_batches)


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
    source = get_source(config)
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
    scheduler: LRScheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
    return scheduler


def _arguments(section: Any, source: str) -> tuple[str, dict[str, Any]]:
    """Returns the type and the arguments of a scheduler section, after a check of their names."""
    name = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        raise DloError(f'{source}: scheduler must have a type, such as "type": "WarmupDecayLR", got {section!r}')
    arguments = {key: value for key, value in (section.get("params") or {}).items() if key != "last_batch_iteration"}
    available = [*CURVES, *_TORCH_SCHEDULES]
    if name not in available:
        raise DloError(
            f"{source}: unknown scheduler.type '{name}'{did_you_mean(name, available) or ';'} available:"
            f" {', '.join(available)}"
        )
    target = _deepspeed_class(name) if name in CURVES else getattr(torch.optim.lr_scheduler, name)
    parameters = inspect.signature(target).parameters
    known = [key for key in parameters if key not in ("self", "optimizer", "last_batch_iteration", "last_epoch")]
    for key in arguments:
        if key not in known:
            hint = did_you_mean(key, known) if nearest(key, known) else f"; known: {', '.join(known)}"
            raise DloError(f"{source}: unknown key 'scheduler.params.{key}' of {name}{hint}")
    missing = [key for key in known if parameters[key].default is inspect.Parameter.empty and key not in arguments]
    if missing:
        raise DloError(f"{source}: scheduler.params of {name} must have {' and '.join(missing)}, got none; add it")
    for key in ("warmup_num_steps", "lr_range_test_step_size", "cycle_first_step_size", "total_num_steps"):
        value = arguments.get(key, 1)
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise DloError(f"{source}: scheduler.params.{key} must be an integer of at least 1, got {value!r}")
    second = arguments.get("cycle_second_step_size")
    if isinstance(second, int | float) and second < 0:
        raise DloError(
            f"{source}: scheduler.params.cycle_second_step_size must be at least 0, got {second!r}; leave it out for"
            " the length of the first step"
        )
    if arguments.get("warmup_type", "log") not in ("log", "linear", "auto"):
        kind = arguments["warmup_type"]
        raise DloError(f"{source}: scheduler.params.warmup_type must be log or linear, got {kind!r}")
    return name, arguments


# --- optimizers that neither torch nor timm has ------------------------------------------------------------------


class UncorrectedAdam(PerParameterOptimizer):
    """Adam whose moments are not corrected for their start at zero, as in BERT's original training.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Constant that is added to the root of the second moment.
        weight_decay: Weight decay.
        decoupled: Whether the decay is apart from the moments, as in AdamW; else it is added to the gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, defaults)

    def step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Takes a step of one parameter."""
        rate, decay = group["lr"], group["weight_decay"]
        if decay and group["decoupled"]:
            parameter.mul_(1 - rate * decay)
        elif decay:
            gradient = gradient.add(parameter, alpha=decay)
        first, second = _moments(self.state[parameter], parameter, gradient, group["betas"])
        parameter.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-rate)


class DeepSpeedLamb(PerParameterOptimizer):
    """DeepSpeed's LAMB.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Constant that is added to the root of the second moment.
        weight_decay: Weight decay, part of the update whose norm the trust ratio has.
        bias_correction: Whether the step is corrected for the moments' start at zero.
        max_coeff: Largest trust ratio.
        min_coeff: Smallest trust ratio.
        eps_inside_sqrt: Whether `eps` is added to the second moment, under the root.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        eps_inside_sqrt: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt}
        super().__init__(params, defaults | {"max_coeff": max_coeff, "min_coeff": min_coeff})

    def step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Takes a step of one parameter."""
        state = self.state[parameter]
        state.setdefault("step", torch.tensor(0.0))
        state["step"] += 1
        count, (beta1, beta2), eps = float(state["step"]), group["betas"], group["eps"]
        first, second = _moments(state, parameter, gradient, (beta1, beta2))
        root = (second + eps).sqrt_() if group["eps_inside_sqrt"] else second.sqrt().add_(eps)
        update = (first / root).add_(parameter, alpha=group["weight_decay"])
        ratio = trust_ratio(parameter, update, (group["min_coeff"], group["max_coeff"]))
        rate = group["lr"]
        if group["bias_correction"]:
            rate = rate * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        parameter.sub_(update.mul_(ratio), alpha=float(rate))


def _moments(state: dict[str, Any], parameter: Tensor, gradient: Tensor, betas: Any) -> tuple[Tensor, Tensor]:
    """Updates a parameter's moments, and returns them."""
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.lerp_(gradient, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    return first, second
