"""Translation of the JSON's optimizer section to an optimizer class of torch or timm.

DeepSpeed builds its own: FusedAdam on CUDA, and with offload a CPUAdam that is compiled on first use. dlo builds the
optimizer itself, so that checkpoints have its state by name and every strategy can read it. The classes here compute
the same step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from dlo_framework.errors import DloError, did_you_mean, nearest
from dlo_plugins.deepspeed.nested_paths import get_stage

#: Defaults of DeepSpeed's own optimizers, where the replacing class has others.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "lamb": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
}

#: Arguments that make timm's LAMB the paper's: by default it clips the gradient by itself, and keeps the trust ratio of
#: parameters without weight decay at 1. DeepSpeed's also clamps the ratio to `min_coeff` 0.01 and `max_coeff` 10.
_LAMB = {"max_grad_norm": None, "always_adapt": True}

#: Arguments that only choose which of DeepSpeed's implementations computes the step.
_IMPLEMENTATION = {
    "adam": {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction"},
    "lion": set[str](),
    "lamb": {"max_coeff", "min_coeff", "eps_inside_sqrt", "max_grad_norm"},
}

#: Allowed values of such arguments: others would change the mathematics.
_ONLY: dict[str, Any] = {
    "fp32_optimizer_states": True,
    "bias_correction": True,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "eps_inside_sqrt": False,
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
    source = getattr(config, "source", "strategy.config")
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
    if "max_grad_norm" in given and _kind(section) != "lamb":
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
    for implementation in _IMPLEMENTATION.get(kind, ()):
        value = arguments.pop(implementation, None)
        if implementation in _ONLY and value not in (None, "auto", _ONLY[implementation]):
            raise DloError(
                f"{source}: optimizer.params.{implementation} must be {_ONLY[implementation]}, as in dlo's"
                f" {cls.__name__}, got {value}; leave it out"
            )
        if implementation == "max_grad_norm" and value not in (None, 0, 0.0, "auto"):
            raise DloError(
                f"{source}: optimizer.params.max_grad_norm must be unset, got {value}; leave it out and set"
                f' "gradient_clipping": {value}'
            )
    _check_arguments(cls, arguments, sorted(_IMPLEMENTATION.get(kind, ())), name, source)
    arguments |= _LAMB if kind == "lamb" else {}
    return cls, {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def _class_of(kind: str, given: Mapping[str, Any], name: str, source: str) -> type[torch.optim.Optimizer]:
    if kind == "adam":
        # DeepSpeed's Adam decouples the weight decay, as AdamW does, unless adam_w_mode is false.
        coupled = name.lower() == "adam" and given.get("adam_w_mode", True) is False
        return torch.optim.Adam if coupled else torch.optim.AdamW
    if kind in ("lion", "lamb"):
        import timm.optim

        found: type[torch.optim.Optimizer] = timm.optim.Lion if kind == "lion" else timm.optim.Lamb
        return found
    known = _torch_classes()
    if kind not in known:
        names = ["AdamW", "Adam", "Lamb", "Lion", *(cls.__name__ for cls in known.values())]
        names = sorted(set(names))
        raise DloError(
            f"{source}: unknown optimizer.type '{name}'{did_you_mean(name, names) or ';'} available: {', '.join(names)}"
        )
    return known[kind]


def _torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Returns torch's optimizers by lower-case name: DeepSpeed looks up names there that it does not know."""
    found = {name: value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    # LBFGS needs a closure, SparseAdam sparse gradients, Muon matrices.
    left_out = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
    return {name.lower(): value for name, value in found.items() if name not in left_out}


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
