"""The JSON's optimizer section as a class of torch's or timm's.

DeepSpeed builds its own: FusedAdam on CUDA, and with offload a CPUAdam that is compiled on first use. dlo has the
optimizer in its own hands, so that its state is in its checkpoints by name and every strategy reads it. The classes
here compute the same step.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from dlo_framework.errors import DloError, did_you_mean, nearest
from dlo_plugins.deepspeed.paths import stage_of

#: DeepSpeed's own optimizers' defaults, where they are not those of the class that takes their place.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "lamb": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
}

#: What timm's LAMB must be told to be the paper's: it clips the gradient by itself, and leaves the ratio of what has no
#: weight decay at 1. DeepSpeed's also keeps the ratio between `min_coeff` 0.01 and `max_coeff` 10.
_LAMB = {"max_grad_norm": None, "always_adapt": True}

#: Arguments that only say which of DeepSpeed's implementations computes the step.
_IMPLEMENTATION = {
    "adam": {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction"},
    "lion": set[str](),
    "lamb": {"max_coeff", "min_coeff", "eps_inside_sqrt", "max_grad_norm"},
}

#: What such an argument may be: all else changes the mathematics.
_ONLY: dict[str, Any] = {
    "fp32_optimizer_states": True,
    "bias_correction": True,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "eps_inside_sqrt": False,
}

#: DeepSpeed's optimizers that need what dlo does not have.
_REFUSED = {
    "muadam": "which needs the package mup",
    "muadamw": "which needs the package mup",
    "musgd": "which needs the package mup",
    "muon": "which needs each parameter marked",
}


def check_optimizer(config: Mapping[str, Any], source: str) -> None:
    """Checks the optimizer section: that dlo has the optimizer, and that it takes the arguments.

    Raises:
        DloError: with the nearest name, for an unknown one.
    """
    section = config.get("optimizer")
    if section is not None:
        _translate(section, source)
    if _kind(section) == "lamb" and stage_of(config) > 0:
        raise DloError(
            f"{source}: Lamb takes the norm of each parameter, but ZeRO's stages 1 to 3 step flat pieces of many; set"
            ' "zero_optimization": {"stage": 0}, or take AdamW'
        )


def optimizer_of(
    config: Mapping[str, Any], own: torch.optim.Optimizer | None = None
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Returns the class and the arguments of the JSON's optimizer; None where the task's own is to be used.

    Args:
        config: the configuration.
        own: the task's optimizer: what is ``"auto"`` in the section is taken from its first parameter group.

    Raises:
        DloError: for an unknown optimizer or argument, and for an ``"auto"`` that the task's optimizer cannot fill.
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
                f'{source}: optimizer.params.{name} is "auto", but the task\'s optimizer'
                f" {type(own).__name__ + ' ' if own is not None else ''}has none to take; give it in the JSON"
            )
        arguments[name] = held[name]
    return kind, arguments


def _kind(section: Any) -> str:
    """Returns `adam`, `lamb` or `lion`, or the lower-cased name of torch's class."""
    name = str(section.get("type", "")).lower() if isinstance(section, Mapping) else ""
    return "adam" if name == "adamw" else name


def _translate(section: Any, source: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Returns the class and the arguments of a section; arguments of ``"auto"`` stay."""
    name = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        raise DloError(f'{source}: optimizer needs a type, such as "type": "AdamW", but was {section!r}')
    given = dict(section.get("params") or {})
    if "max_grad_norm" in given and _kind(section) != "lamb":
        raise DloError(
            f"{source}: optimizer.params.max_grad_norm is no argument of an optimizer; leave it out and set"
            f' "gradient_clipping": {given["max_grad_norm"]}'
        )
    if name.lower() in _REFUSED:
        raise DloError(
            f"{source}: optimizer {name} is DeepSpeed's own, {_REFUSED[name.lower()]}; leave the section out: the"
            " task's optimizer is used then"
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
                f"{source}: optimizer.params.{implementation} {value} is DeepSpeed's own; dlo's {cls.__name__} has"
                f" {_ONLY[implementation]}: leave it out"
            )
        if implementation == "max_grad_norm" and value not in (None, 0, 0.0, "auto"):
            raise DloError(
                f'{source}: optimizer.params.max_grad_norm {value}: leave it out and set "gradient_clipping": {value}'
            )
    _check_arguments(cls, arguments, sorted(_IMPLEMENTATION.get(kind, ())), name, source)
    arguments |= _LAMB if kind == "lamb" else {}
    return cls, {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def _class_of(kind: str, given: Mapping[str, Any], name: str, source: str) -> type[torch.optim.Optimizer]:
    if kind == "adam":
        # DeepSpeed's Adam decouples the weight decay, as AdamW does, unless it is told not to.
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
    """Returns torch's optimizers by lower-cased name: DeepSpeed takes the names that it does not know from there."""
    found = {name: value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    # LBFGS asks for a closure, SparseAdam for sparse gradients, Muon for matrices alone.
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
                f"{source}: optimizer.params.{argument} is no text, but was {value!r}; write 0.001, or 1.0e-3"
            )
