"""LAMB with bounds on the trust ratio, and LAMB with a quantised state.

Large Batch Optimization for Deep Learning: Training BERT in 76 minutes. You et al., 2019, arXiv 1904.00962. The bounds
are those of DeepSpeed's Lamb (``min_coeff``, ``max_coeff``), with which its BERT recipes train.

Departures from the paper: the ratio |w| / |update| is bounded, instead of |w| (the paper's phi); it is 1 where either
norm is 0. Gradients are not clipped here: set ``trainer.gradient_clip_val``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.optimizers import PerParameterOptimizer, trust_ratio


class BoundedLamb(PerParameterOptimizer):
    """LAMB whose trust ratio has bounds.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Constant that is added to the root of the second moment.
        weight_decay: Weight decay, part of the update whose norm the ratio has.
        trust_bounds: Smallest and largest trust ratio; None for no bounds.

    Raises:
        DloError: A value is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        trust_bounds: tuple[float, float] | None = (0.01, 0.3),
    ) -> None:
        if trust_bounds is not None and not (len(trust_bounds) == 2 and 0 <= trust_bounds[0] <= trust_bounds[1]):
            raise DloError(
                f"trust_bounds of {type(self).__name__} must be [smallest, largest] from 0 on, got"
                f" {list(trust_bounds)}; DeepSpeed's BERT recipes use [0.01, 0.3]"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise DloError(f"betas of {type(self).__name__} must be in [0, 1), got {list(betas)}; use [0.9, 0.999]")
        bounds = None if trust_bounds is None else (float(trust_bounds[0]), float(trust_bounds[1]))
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "trust_bounds": bounds}
        super().__init__(params, defaults)

    def new_moment(self, parameter: Tensor, *, signed: bool) -> Tensor:
        """Returns a moment of a parameter, zeros."""
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def step_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Takes a step of one parameter."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = self.new_moment(parameter, signed=True)
            state["exp_avg_sq"] = self.new_moment(parameter, signed=False)
        state["step"] += 1
        count, (beta1, beta2) = float(state["step"]), group["betas"]
        dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
        gradient, weight = gradient.to(dtype), parameter.to(dtype)
        first = _plain(state["exp_avg"]).to(dtype).lerp(gradient, 1 - beta1)
        second = _plain(state["exp_avg_sq"]).to(dtype).lerp(gradient.square(), 1 - beta2)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        root = second.div_(1 - beta2**count).sqrt_().add_(group["eps"])
        update = first.div_(1 - beta1**count).div_(root).add_(weight, alpha=group["weight_decay"])
        bounds = group["trust_bounds"]
        update.mul_(trust_ratio(weight, update, None if bounds is None else tuple(bounds)))
        weight.sub_(update, alpha=group["lr"])
        if weight is not parameter:
            parameter.copy_(weight)


def _plain(moment: Tensor) -> Tensor:
    """Returns a moment in full precision."""
    return moment if type(moment) is Tensor else moment.dequantize()
