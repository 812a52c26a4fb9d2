"""Probes whether an optimizer's update of an element depends on that element, on its full tensor, or on all tensors.

The probe runs the optimizer instead of looking up its name. So it is right for a user's own optimizer too, and for a
flag that changes the update (timm's ``caution`` takes a mean over the tensor).
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import defaultdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.distributed.local_memory import local_tensor

Kind = Literal["elementwise", "tensor", "all"]

_STEPS = 3
_SHAPES = ((6, 4), (4, 8))
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def probe_optimizer(optimizer: Optimizer) -> Kind:
    """Returns what an optimizer's update of an element depends on.

    A copy of the optimizer takes a few steps on small tensors, with the settings of each parameter group in turn: on
    two full tensors, on one of them alone, and on that one cut in two.

    Returns:
        Kind of the update: ``"elementwise"`` if it depends on that element's gradients alone, ``"tensor"`` if on others
        of its tensor too, ``"all"`` if on other tensors too.
    """
    kinds = {_probe_group(optimizer, group) for group in optimizer.param_groups}
    return next((kind for kind in ("all", "tensor") if kind in kinds), "elementwise")


def _probe_group(optimizer: Optimizer, group: dict[str, Any]) -> Kind:
    # Parameters of other pipeline stages are on the meta device.
    held = [parameter for parameter in group["params"] if not parameter.is_meta]
    device = held[0].device if held else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(device) for shape in _SHAPES]
    # Large, so that an optimizer that clips by the global norm does clip.
    gradients = [[10 * torch.randn(shape, generator=generator).to(device) for shape in _SHAPES] for _ in range(_STEPS)]
    together = _stepped(optimizer, group, weights, gradients)
    alone = _stepped(optimizer, group, weights[:1], [step[:1] for step in gradients])
    if not _same(together[0], alone[0]):
        return "all"
    half = weights[0].numel() // 2 - 1  # not at the end of a row
    try:
        cut = _stepped(
            optimizer,
            group,
            list(weights[0].flatten().split([half, weights[0].numel() - half])),
            [list(step[0].flatten().split([half, weights[0].numel() - half])) for step in gradients],
        )
    except (RuntimeError, ValueError, IndexError):
        return "tensor"  # The optimizer needs two dims, as Muon does, and raised.
    return "elementwise" if _same(torch.cat(cut), alone[0].flatten()) else "tensor"


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], weights: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    """Returns the weights after a copy of the optimizer has stepped them, with one gradient per weight and step."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    settings = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
    # A warm-up starts at lr 0, where no update can be seen.
    settings["lr"] = max(float(settings["lr"]), 1e-2) if "lr" in settings else 1e-2
    if not isinstance(settings.get("weight_decay", True), bool):
        settings["weight_decay"] = max(float(settings["weight_decay"]), 1e-2)  # Without decay, LARS ignores norms.
    trial = _trial(optimizer, [{**settings, "params": parameters}])
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        _step(trial)
    return [parameter.detach() for parameter in parameters]


def requires_closure(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's ``step`` requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _step(trial: Optimizer) -> None:
    """Takes a step, with a closure where ``step`` requires one."""
    step: Any = type(trial).step
    if requires_closure(trial):
        step(trial, lambda: torch.zeros(()))
    else:
        step(trial)


def _trial(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Returns a copy, without state, of an optimizer and of the optimizers that it wraps; it steps other groups.

    ``copy.copy`` does not do: the ``__getstate__`` of torch's optimizers leaves a subclass's own attributes out.
    """
    trial = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # A scheduler has wrapped the original's, to count its calls.
        if isinstance(value, Optimizer):
            value = _trial(value, groups)
        elif isinstance(value, dict | list | set):
            value = type(value)() if name in _HOOKS else copy.copy(value)
        elif isinstance(value, Tensor):
            value = value.clone()
        setattr(trial, name, value)
    trial.param_groups = groups
    trial.state = defaultdict(dict)
    for parameter in (parameter for group in groups for parameter in group["params"]) if optimizer.state else ():
        trial.state[parameter] = _first_state(optimizer, parameter)
    return trial


def _first_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Returns a parameter's state as the constructor made it: torch's Adagrad fills each tensor with one value."""
    made = max(((len(p.shape), state) for p, state in optimizer.state.items()), key=operator.itemgetter(0))[1]
    return {
        name: torch.full_like(
            parameter, local_tensor(value).flatten()[:1].sum().item(), dtype=value.dtype, requires_grad=False
        )
        if isinstance(value, Tensor) and value.ndim
        else copy.deepcopy(value)
        for name, value in made.items()
    }


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7)
