"""The list of optimizers that tasks name, to which packages add by entry points in `dlo_framework.optimizers`.

And bases of such optimizers. Canonical checkpoints hold one tensor or plain value a key of an optimizer's state, no
lists of tensors: :class:`FlatState`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.extensions import NamedFunctions

#: Optimizer classes by name. A constructor takes parameter groups, ``lr``, ``weight_decay`` and more arguments by
#: keyword. A class attribute ``callback`` is the path of a callback that the optimizer needs, and ``schedule_free``
#: says that its learning rate must have no schedule.
OPTIMIZERS: NamedFunctions[type[Optimizer]] = NamedFunctions("optimizer", "dlo_framework.optimizers")

#: Tensors that one call changes together.
Tensors = list[Tensor] | tuple[Tensor, ...]


def stepped_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Returns the tensors of all groups of an optimizer, in their order."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


class PerParameterOptimizer(Optimizer):
    """Base class of optimizers that step one parameter after the other; a parameter without elements is not stepped."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step.

        Args:
            closure: Function that computes gradients and returns the loss.
        """
        loss = run_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    self.step_parameter(parameter, parameter.grad, group)
        return loss

    def step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Takes a step of one parameter."""
        raise NotImplementedError


def multiply_all(tensors: Tensors, factors: Any) -> None:
    """Multiplies tensors in place, in few kernels, as torch's optimizers do; it has no public name (2.11 to 2.15).

    Args:
        tensors: Tensors, also DTensors.
        factors: Number, tensor of one element, or a sequence of a number or tensor for each tensor.
    """
    torch._foreach_mul_(tensors, factors)


def copy_all(targets: Tensors, values: Tensors) -> None:
    """Copies a value to each tensor in place, in few kernels, as :func:`multiply_all`."""
    torch._foreach_copy_(targets, values)


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Returns the loss of the function that an optimizer's step may be given, which computes gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def trust_ratio(weight: Tensor, update: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """Returns LAMB's trust ratio |weight| / |update|, in bounds; 1 where a norm is 0. It does not wait for the device.

    Large Batch Optimization for Deep Learning: Training BERT in 76 minutes. You et al., 2019, arXiv 1904.00962.

    Args:
        weight: Weights.
        update: Adam's update, weight decay included.
        bounds: Smallest and largest ratio; None for no bounds.
    """
    norm, length = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(update)
    ratio = norm / length
    if bounds is not None:
        ratio = ratio.clamp(*bounds)
    return torch.where((norm > 0) & (length > 0), ratio, torch.ones_like(ratio))


_NUMBERED = re.compile(r"^(.+)\.(\d+)$")


class FlatState(Optimizer):
    """Base of optimizers whose ``state_dict`` has a flat form of each parameter's state.

    It precedes the library's class in the bases. :meth:`flatten` and :meth:`restore` are the two directions.
    """

    def flatten(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a parameter's state with ``key.0``, ``key.1``, ... in place of each list under ``key``."""
        flat: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, list) and value:
                flat |= {f"{key}.{number}": item for number, item in enumerate(value)}
            else:
                flat[key] = value
        return flat

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state from which :meth:`flatten` made ``state``."""
        restored: dict[str, Any] = {}
        lists: dict[str, dict[int, Any]] = {}
        for key, value in state.items():
            match = _NUMBERED.match(key)
            if match is None:
                restored[key] = value
            else:
                lists.setdefault(match[1], {})[int(match[2])] = value
        return restored | {key: [items[number] for number in sorted(items)] for key, items in lists.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in its flat form."""
        packed = super().state_dict()
        return {**packed, "state": {number: self.flatten(state) for number, state in packed["state"].items()}}

    def load_state_dict(self, state_dict: Any, *options: Any, **named: Any) -> None:
        """Loads a state in its flat form; more arguments are those of the library's class."""
        state = {number: self.restore(state) for number, state in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state}, *options, **named)


class FullMatrices(FlatState):
    """Base of optimizers whose library expects gradients of matrices, and takes any keyword.

    A strategy's placeholder, which has no elements, is not stepped.
    """

    def step(self, closure: Any = None) -> Any:
        """Takes a step."""
        loss = run_closure(closure)
        empty = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.numel() == 0]
        for parameter, _ in empty:
            parameter.grad = None
        try:
            super().step()
        finally:
            for parameter, gradient in empty:
                parameter.grad = gradient
        return loss
