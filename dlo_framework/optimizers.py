"""The list of optimizers that tasks name, to which packages add by entry points in `dlo_framework.optimizers`.

And the parts that optimizers of packages share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.extensions import NamedFunctions

#: Optimizer classes by name. A constructor takes parameter groups, ``lr``, ``weight_decay`` and more arguments by
#: keyword. A class attribute ``callback`` is the path of a callback that the optimizer needs, and ``schedule_free``
#: says that its learning rate must have no schedule.
OPTIMIZERS: NamedFunctions[type[Optimizer]] = NamedFunctions("optimizer", "dlo_framework.optimizers")


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
