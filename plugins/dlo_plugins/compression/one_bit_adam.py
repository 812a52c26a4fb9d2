"""1-bit Adam: Adam whose ranks exchange one bit an element once its second moment has settled.

Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, "1-bit Adam: Communication Efficient Large-Scale Training with
Adam's Convergence Speed", 2021 (arXiv 2102.02888).

Adam's second moment is not linear in the gradient, so that errors of compression do not cancel in it; momentum is. The
paper finds that the second moment hardly changes after a while. So: ordinary Adam first; then the second moment is
frozen, ranks add their own gradients to momenta, and these are averaged, compressed with error feedback.

Departures:

- The first stage is AdamW with bias correction, as torch has it, and the correction of the second moment is frozen with
  it. The paper's Adam has none.
- Each rank keeps a momentum of its own. The paper's ranks go on from the mean momentum as it came out of compression:
  what compression leaves over then enters the momentum again and again, and weighs 1 / (1 - beta1) times, ten times,
  in the weights. Without it they differ from the uncompressed ones' by what is left over once. So do Zheng, Huang,
  Kwok, "Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback", 2019 (arXiv 1905.10936).
- What is compressed is the step, the momentum over the root of the second moment, and not the momentum. The frozen root
  is the same on all ranks, so that it is the same method with another compressor: what compression adds to an element
  is in proportion to its own step, where it would be as large for all elements that share a scale, and so many steps
  long for those whose gradients are small.
- The second moment may be brought up to date now and then (``refresh_every``), by an exchange of whole gradients in
  one step of so many. So does Lu, Li, Zhang, De Sa, He, "Maximizing Communication Efficiency for Large-scale Training
  via 0/1 Adam", 2022 (arXiv 2202.06009), at intervals that grow.
- The roots have a floor (``least_root``), see :func:`~dlo_plugins.compression.one_bit.frozen_denominators`, and steps a
  limit (``max_rms``), see :func:`~dlo_plugins.compression.one_bit.limit_rms_`: gradients may come to be larger than
  those that the second moment has seen.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from dlo_framework.errors import DloError
from dlo_plugins.compression.one_bit import OneBitOptimizer, frozen_denominators, gradients_of, limit_rms_


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam with decoupled weight decay (arXiv 2102.02888): AdamW that communicates one bit an element.

    The first ``freeze_step`` steps are torch's AdamW to the last bit, its state has AdamW's names, and either goes on
    from the other's checkpoint. For the second stage the callback ``GradientCompression(method: one_bit)`` is needed;
    without it, or in a single process, this is AdamW throughout.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        freeze_step: steps of the first stage. The paper takes 15 to 25% of all, and no fewer than the warm-up of the
            learning rate has.
        refresh_every: so many steps apart, gradients are exchanged whole and the second moment goes on, in the second
            stage too; see the module's text. None never, as in the paper.
        least_root: the smallest root of the second moment, as a part of the root of its tensor's mean.
        max_rms: in the second stage, no tensor's step is longer than this times the learning rate, as a root mean
            square; Adam's are 0.2 to 0.5 long.
        foreach: as of AdamW.

    Raises:
        DloError: on values out of range.
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
        if not 0 <= least_root <= 1:
            raise DloError(f"OneBitAdam: least_root lies in [0, 1], given {least_root}; 0.3 is usual")
        if not max_rms > 0:
            raise DloError(f"OneBitAdam: max_rms is above 0, given {max_rms}; 1 is usual")
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
        """Adds this rank's gradients to its momenta, averages these over the ranks, and takes the step."""
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
        """Takes the step that ``averages`` hold, and makes momenta of them again."""
        limit_rms_(averages, self.max_rms)
        counts = [self.state[p]["step"] for p in parameters]
        torch._foreach_add_(counts, 1)
        rates = [-group["lr"] / (1 - group["betas"][0] ** float(count)) for count in counts]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, torch._foreach_mul(averages, rates))
        torch._foreach_mul_(averages, roots)

    def _steps_in_state(self) -> int:
        return int(max((float(state["step"]) for state in self.state.values() if "step" in state), default=0))
