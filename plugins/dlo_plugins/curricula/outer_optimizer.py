"""Outer optimizer of local training: Nesterov momentum on the mean change of the copies' weights.

DiLoCo: Distributed Low-Communication Training of Language Models. Douillard et al., 2023, arXiv 2311.08105.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class OuterOptimizer:
    """Shared weights, and their momentum.

    One step, with the mean `w` of the copies' weights: `d = shared - w`, `m = momentum * m + d`, and
    `shared -= lr * (d + momentum * m)`; this is torch's SGD with Nesterov momentum for the gradient `d`.

    Args:
        weights: Initial weights, which are copied.
        lr: Learning rate of the outer step.
        momentum: Momentum of the outer step.

    Attributes:
        shared: Shared weights, the same on all ranks.
        momenta: Momenta, in the order of the weights.
    """

    def __init__(self, weights: Sequence[Tensor], lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.shared = [weight.detach().clone() for weight in weights]
        self.momenta = [torch.zeros_like(weight) for weight in self.shared]

    @torch.no_grad()
    def step(self, means: list[Tensor], norm_of: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Steps the shared weights; returns the norm of the mean change, a scalar.

        Args:
            means: Means of the copies' weights; they are overwritten.
            norm_of: Function of the change that returns its norm.
        """
        torch._foreach_sub_(means, self.shared)  # the change, with the opposite sign of the gradient
        norm = norm_of(means)
        torch._foreach_mul_(self.momenta, self.momentum)
        torch._foreach_sub_(self.momenta, means)
        torch._foreach_add_(self.shared, means, alpha=self.lr)
        torch._foreach_add_(self.shared, self.momenta, alpha=-self.lr * self.momentum)
        return norm
