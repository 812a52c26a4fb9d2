"""Implements 1-bit Adam: Adam that communicates one bit per element once its second moment has settled.

Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, "1-bit Adam: Communication Efficient Large-Scale Training with
Adam's Convergence Speed", 2021 (arXiv 2102.02888).

Momentum is linear in the gradient, so that compression errors cancel in it; Adam's second moment is not. The paper
finds that the second moment hardly changes after a while. So the first stage is ordinary Adam. In the second stage the
second moment is frozen, ranks add their local gradients to momenta, and these are averaged, compressed with error
feedback.

Departures:

- The first stage is torch's AdamW with bias correction, and the correction of the second moment is frozen with it. The
  paper's Adam has no bias correction.
- Each rank keeps a local momentum. The paper's ranks continue from the compressed mean momentum: its compression error
  then enters the momentum repeatedly, and has 1 / (1 - beta1) times, ten times, its size in the weights. With local
  momenta the weights differ from the uncompressed ones by the error once. So do Zheng, Huang, Kwok,
  "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", 2019 (arXiv 1905.10936).
- The step is compressed, which is the momentum over the root of the second moment, instead of the momentum. The frozen
  root is the same on all ranks, so that this is the same method with another compressor: the error of an element is in
  proportion to its own step. Otherwise all elements that share a scale have errors of the same size, which is many
  steps long for those with small gradients.
- The second moment may be updated at intervals (``refresh_every``), by an all-reduce of full gradients in that step. So
  do Lu, Li, Zhang, De Sa, He, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", 2022
  (arXiv 2202.06009), at intervals that grow.
- The roots have a floor (``least_root``), see :func:`~dlo_plugins.compression.one_bit.frozen_denominators`, and steps a
  limit (``max_rms``), see :func:`~dlo_plugins.compression.one_bit.limit_rms_`: gradients may become larger than those
  that are in the second moment.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from dlo_framework.errors import check_number
from dlo_plugins.compression.one_bit import OneBitOptimizer, frozen_denominators, gradients_of, limit_rms_


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam with decoupled weight decay (arXiv 2102.02888): AdamW that communicates one bit per element.

    The first ``freeze_step`` steps are bit-equal to torch's AdamW, the state has AdamW's names, and each optimizer
    loads the other's checkpoint. The second stage needs the callback ``GradientCompression(method: one_bit)``; without
    it, or in a single process, all steps are AdamW's.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate.
        betas: Decay of the first and second moment.
        eps: Constant that is added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        freeze_step: Number of steps of the first stage. The paper uses 15 to 25% of all, and at least the warm-up of
            the learning rate.
        refresh_every: Interval in steps at which the second stage all-reduces full gradients and updates the second
            moment; see the module's text. None never does, as in the paper.
        least_root: Smallest root of the second moment, as a fraction of the root of its tensor's mean.
        max_rms: Maximum root mean square of a tensor's step in the second stage, in learning rates; Adam's are 0.2 to
            0.5.
        foreach: Option of AdamW.

    Raises:
        DloError: A value is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int,
        refresh_every: int | None = None,
        least_root: float = 0.3,
        max_rms: float = 1.0,
        foreach: bool | None = None,
    ) -> None:
        check_number("least_root of OneBitAdam", least_root, "at least 0 and at most 1", "use 0.3")
        check_number("max_rms of OneBitAdam", max_rms, "above 0", "use 1")
        self.least_root, self.max_rms, self.foreach = least_root, max_rms, foreach
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, freeze_step, refresh_every)

    def warm_up_step(self) -> None:
        """Takes a step of AdamW."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    }
            states = [self.state[parameter] for parameter in parameters]
            adam(
                parameters,
                [p.grad for p in parameters if p.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                foreach=self.foreach,
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def compressed_step(self) -> None:
        """Adds local gradients to the local momenta, averages the steps over the ranks, and takes them."""
        assert self.communicator is not None
        own, trained = iter(self.own_momenta()), [self.trained(group) for group in self.param_groups]
        averages: list[list[Tensor]] = []
        roots: list[list[Tensor]] = []
        for group, parameters in zip(self.param_groups, trained, strict=True):
            momenta = list(itertools.islice(own, len(parameters)))
            variances, gradients = [self.state[p]["exp_avg_sq"] for p in parameters], gradients_of(parameters)
            self.refresh(group, variances, gradients)
            correction = 1 - group["betas"][1] ** group["frozen_at"] if parameters else 1.0
            roots.append(list(frozen_denominators(variances, correction, group["eps"], self.least_root)))
            averages.append([self.state[p]["exp_avg"] for p in parameters])
            if parameters:
                torch._foreach_lerp_(momenta, gradients, 1 - group["betas"][0])
                torch._foreach_copy_(averages[-1], momenta)
                torch._foreach_div_(averages[-1], roots[-1])
        self.communicator.average([average for of_group in averages for average in of_group])
        for group, parameters, steps, divisors in zip(self.param_groups, trained, averages, roots, strict=True):
            if parameters:
                self._apply(group, parameters, steps, divisors)

    def _apply(
        self, group: dict[str, Any], parameters: list[Tensor], averages: list[Tensor], roots: list[Tensor]
    ) -> None:
        """Takes the steps in ``averages``, and turns them back into momenta."""
        limit_rms_(averages, self.max_rms)
        counts = [self.state[p]["step"] for p in parameters]
        torch._foreach_add_(counts, 1)
        rates = [-group["lr"] / (1 - group["betas"][0] ** float(count)) for count in counts]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, torch._foreach_mul(averages, rates))
        torch._foreach_mul_(averages, roots)

    def _steps_in_state(self) -> int:
        return int(max((float(state["step"]) for state in self.state.values() if "step" in state), default=0))
