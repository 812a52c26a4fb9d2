"""Implements 1-bit LAMB: LAMB that communicates one bit per element and scales frozen trust ratios.

Li, Awan, Tang, Rajbhandari, He, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
Convergence Speed", 2021 (arXiv 2104.06069).

As in 1-bit Adam, the second moment is frozen after a first stage. LAMB's trust ratio, one number per tensor, cannot be
computed from compressed momenta as from exact ones. So its average over the first stage is frozen too, and scaled by
the change of the second moment since. That change needs no communication: the mean gradient follows from the mean
momentum, ``(m_t - beta1 m_{t-1}) / (1 - beta1)``, and its squares are accumulated in a *fresh* second moment.

Departures:

- The first stage is timm's LAMB, with bias correction and clipping by the global gradient norm. In the second stage
  that norm is the mean of the ranks' local norms, which is at least the norm of the mean.
- The paper scales the momenta of all tensors to one magnitude before they share a compression scale. Here no two
  tensors share one (:mod:`dlo_plugins.compression.compressed_all_reduce`), and steps are compressed instead of
  momenta, as in :mod:`~dlo_plugins.compression.one_bit_adam`, so that scaling is not needed.
- The ratio of second moments is taken between roots with the same floor, so that the largest ratio, which the paper
  uses, is not that of an element without gradients.
- The average of trust ratios starts at the first one instead of zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.optimizers import trust_ratio
from dlo_plugins.compression.one_bit import OneBitOptimizer, frozen_denominators, gradients_of


class OneBitLamb(OneBitOptimizer):
    """1-bit LAMB (arXiv 2104.06069): LAMB that communicates one bit per element.

    The first ``freeze_step`` steps are those of timm's ``lamb``, whose checkpoints it loads. As there, groups without
    weight decay have no trust ratio. The second stage needs the callback ``GradientCompression(method: one_bit)``;
    without it, or in a single process, all steps are LAMB's.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Constant that is added to the root of the second moment.
        weight_decay: Weight decay, which is added to the step before the trust ratio is computed.
        max_grad_norm: Maximum global norm, to which gradients are clipped; None does not clip.
        freeze_step: Number of steps of the first stage; the paper uses about 20% of all.
        refresh_every: Interval of updates of the second moment; see
            :class:`~dlo_plugins.compression.one_bit_adam.OneBitAdam`.
        coefficient_beta: Decay of the average of trust ratios.
        factor_range: Smallest and largest factor of the frozen trust ratio.
        factor_change: Maximum relative change of that factor in one step.
        least_root: Smallest root of the second moment, as a fraction of the root of its tensor's mean.

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
        *,
        max_grad_norm: float | None = 1.0,
        freeze_step: int,
        refresh_every: int | None = None,
        coefficient_beta: float = 0.9,
        factor_range: tuple[float, float] = (0.5, 4.0),
        factor_change: float = 0.1,
        least_root: float = 0.01,
    ) -> None:
        if not 0 < factor_range[0] <= 1 <= factor_range[1]:
            raise DloError(f"factor_range of OneBitLamb must include 1, got {tuple(factor_range)}; use (0.5, 4)")
        if not (0 <= coefficient_beta < 1 and 0 < factor_change <= 1 and 0 < least_root <= 1):
            raise DloError(
                "coefficient_beta of OneBitLamb must be in [0, 1), factor_change and least_root in (0, 1], got"
                f" {coefficient_beta}, {factor_change} and {least_root}; use 0.9, 0.1 and 0.01"
            )
        self.max_grad_norm, self.coefficient_beta, self.least_root = max_grad_norm, coefficient_beta, least_root
        self.factor_range, self.factor_change = factor_range, factor_change
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, freeze_step, refresh_every)

    def warm_up_step(self) -> None:
        """Takes a step of LAMB, and averages the trust ratios."""
        clip = self._clip([p for group in self.param_groups for p in group["params"]], everywhere=True)
        for group in self.param_groups:
            group["step"] = self._next_step(group)
            step, (beta1, beta2) = float(group["step"]), group["betas"]
            corrections = 1 - beta1**step, 1 - beta2**step
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                gradient = p.grad if clip is None else p.grad / clip
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = (state["exp_avg_sq"].sqrt() / corrections[1] ** 0.5).add_(group["eps"])
                update = (state["exp_avg"] / corrections[0]).div_(root)
                if group["weight_decay"]:
                    update.add_(p, alpha=group["weight_decay"])
                    ratio = trust_ratio(p, update, None)
                    update.mul_(ratio)
                    known = state.get("trust_ratio")
                    state["trust_ratio"] = ratio if known is None else known.lerp(ratio, 1 - self.coefficient_beta)
                p.add_(update, alpha=-group["lr"])

    def compressed_step(self) -> None:
        """Adds local gradients to the local momenta, averages the steps over the ranks, and takes them."""
        assert self.communicator is not None
        trained = [self.trained(group) for group in self.param_groups]
        clip = self._clip([p for parameters in trained for p in parameters], everywhere=False)
        before: list[Tensor] = []
        steps: list[Tensor] = []
        roots: list[Tensor] = []
        own = iter(self.own_momenta())
        for group, parameters in zip(self.param_groups, trained, strict=True):
            gradients = [g if clip is None else g / clip for g in gradients_of(parameters)]
            variances = [self.state[p]["exp_avg_sq"] for p in parameters]
            self.refresh(group, variances, gradients)
            divisors = self._roots(group, variances)
            for p, gradient, root in zip(parameters, gradients, divisors, strict=True):
                momentum, average = next(own), self.state[p]["exp_avg"]
                momentum.lerp_(gradient, 1 - group["betas"][0])
                before.append(average.clone())
                steps.append(torch.div(momentum, root, out=average))
            roots += divisors
        self.communicator.average(steps)
        number = 0
        for group, parameters in zip(self.param_groups, trained, strict=True):
            group["step"] = self._next_step(group)
            for p in parameters:
                self._apply(group, p, before[number], roots[number])
                number += 1

    def _apply(self, group: dict[str, Any], p: Tensor, before: Tensor, root: Tensor) -> None:
        """Takes a parameter's step, and turns ``exp_avg``, which has the averaged step, back into the momentum."""
        state, (beta1, beta2) = self.state[p], group["betas"]
        plain = state["exp_avg"] / (1 - beta1 ** float(group["step"]))
        state["exp_avg"].mul_(root)
        if group["weight_decay"] and "trust_ratio" in state:
            gradient = torch.lerp(before, state["exp_avg"], 1 / (1 - beta1))
            if "exp_avg_sq_fresh" not in state:
                state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
            fresh = state["exp_avg_sq_fresh"]
            fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            update = plain.add(p, alpha=group["weight_decay"])
            share = (plain.norm() / update.norm().clamp_min(1e-30)).clamp(max=1)
            state["factor"] = self._factor(root, self._roots(group, [fresh])[0], share, state.get("factor"))
            update.mul_(state["trust_ratio"] * state["factor"])
        else:
            update = plain.add(p, alpha=group["weight_decay"]) if group["weight_decay"] else plain
        p.add_(update, alpha=-group["lr"])

    def _factor(self, frozen: Tensor, fresh: Tensor, share: Tensor, last: Tensor | None) -> Tensor:
        """Returns the factor of the frozen trust ratio, from the change of the second moment.

        Args:
            frozen: Roots of the frozen second moment.
            fresh: Roots of the fresh second moment.
            share: Fraction of the step's norm without weight decay, which does not depend on the second moment.
            last: Factor of the last step; None in the first.
        """
        factor = (frozen / fresh).max() * share + (1 - share)
        last = torch.ones_like(factor) if last is None else last
        factor = factor.clamp(*self.factor_range)
        return torch.clamp(factor, last * (1 - self.factor_change), last * (1 + self.factor_change))

    def _roots(self, group: dict[str, Any], variances: list[Tensor]) -> list[Tensor]:
        correction = 1 - group["betas"][1] ** group["frozen_at"]
        return list(frozen_denominators(variances, correction, group["eps"], self.least_root))

    def _clip(self, parameters: list[Tensor], everywhere: bool) -> Tensor | None:
        """Returns the divisor of gradients, at least 1; None without a maximum norm."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.max_grad_norm is None or not gradients:
            return None
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if not everywhere:
            assert self.communicator is not None
            norm = self.communicator.mean(norm)
        return (norm / self.max_grad_norm).clamp_(min=1.0)

    def _next_step(self, group: dict[str, Any]) -> Tensor:
        known = group.get("step")
        return (torch.tensor(0.0) if known is None else torch.as_tensor(known, dtype=torch.float32)) + 1

    def _steps_in_state(self) -> int:
        return int(max((float(group.get("step") or 0) for group in self.param_groups), default=0))
