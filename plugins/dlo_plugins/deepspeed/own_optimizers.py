"""DeepSpeed's Adam without bias correction, and its Lamb: steps that neither torch nor timm has.

The steps are those of DeepSpeed 0.19.8's kernels (``csrc/adam``, ``csrc/lamb``), in torch's operators on any device.
Adam: A Method for Stochastic Optimization. Kingma and Ba, 2014, arXiv 1412.6980. Large Batch Optimization for Deep
Learning: Training BERT in 76 minutes. You et al., 2019, arXiv 1904.00962. Departures of DeepSpeed's Lamb from the
paper: the trust ratio has bounds, and the bias correction scales the step, not the update whose norm the ratio has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_framework.optimizers import PerParameterOptimizer, trust_ratio


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
