"""1-bit Adam and 1-bit LAMB: optimizers that communicate one bit per element once their second moment has settled.

Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, "1-bit Adam: Communication Efficient Large-Scale Training with
Adam's Convergence Speed", 2021 (arXiv 2102.02888).

Momentum is linear in the gradient, so that compression errors cancel in it; Adam's second moment is not. The paper
finds that the second moment hardly changes after a while. So the first stage is ordinary Adam. In the second stage the
second moment is frozen, ranks add their local gradients to momenta, and these are averaged, compressed with error
feedback.

Departures of 1-bit Adam:

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

1-bit LAMB scales frozen trust ratios.

Li, Awan, Tang, Rajbhandari, He, "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
Convergence Speed", 2021 (arXiv 2104.06069).

As in 1-bit Adam, the second moment is frozen after a first stage. LAMB's trust ratio, one number per tensor, cannot be
computed from compressed momenta as from exact ones. So its average over the first stage is frozen too, and scaled by
the change of the second moment since. That change needs no communication: the mean gradient follows from the mean
momentum, ``(m_t - beta1 m_{t-1}) / (1 - beta1)``, and its squares are accumulated in a *fresh* second moment.

Departures of 1-bit LAMB:

- The first stage is timm's LAMB, with bias correction and clipping by the global gradient norm. In the second stage
  that norm is the mean of the ranks' local norms, which is at least the norm of the mean.
- The paper scales the momenta of all tensors to one magnitude before they share a compression scale. Here no two
  tensors share one (:mod:`dlo_plugins.compression.compressed_all_reduce`), and steps are compressed instead of
  momenta, as in 1-bit Adam, so that scaling is not needed.
- The ratio of second moments is taken between roots with the same floor, so that the largest ratio, which the paper
  uses, is not that of an element without gradients.
- The average of trust ratios starts at the first one instead of zero.
"""

from __future__ import annotations

import itertools
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from dlo_framework.errors import DloError, check_number
from dlo_framework.optimizers import copy_all, multiply_all, run_closure, trust_ratio
from dlo_plugins.compression.compressed_all_reduce import CompressedAllReduce


class OneBitOptimizer(Optimizer):
    """Optimizer whose ranks average gradients in a first stage, and compressed momenta in a second.

    For the first ``freeze_step`` steps gradients are averaged, and the step is the ordinary one. Then the second moment
    is frozen and gradients are local: each rank keeps its own momentum, and the step uses the mean of the momenta,
    which ``communicator`` computes. Without a communicator (a single process) the first stage never ends.

    The state has the mean momenta, the same on all ranks, so that any other optimizer can load it; the local momenta of
    a rank are in :attr:`own`.

    A parameter without a gradient is skipped in the first stage, and has a zero gradient in the second. If no parameter
    has a gradient, the step does nothing.

    Args:
        params: Parameters, or parameter groups.
        defaults: Default settings of the groups.
        freeze_step: Number of steps of the first stage.
        refresh_every: Interval in steps at which the second stage updates the second moment; None never does.

    Attributes:
        communicator: Mean over the ranks, set by the callback.
        freeze_step: Number of steps of the first stage; it is not in the state, so that a resumed run may change it.
        own: Local momenta of this rank, in the order of :meth:`momenta`; None where they start at the mean ones.

    Raises:
        DloError: A value is out of range.
    """

    def __init__(
        self, params: Any, defaults: dict[str, Any], freeze_step: int, refresh_every: int | None = None
    ) -> None:
        name = type(self).__name__
        if refresh_every is not None and refresh_every < 2:
            raise DloError(
                f"refresh_every of {name} must be at least 2, got {refresh_every}, since such steps all-reduce full"
                " gradients; use 8, which sends about a sixth of Adam's bytes"
            )
        if freeze_step < 1:
            raise DloError(
                f"freeze_step of {name} must be at least 1, got {freeze_step}, since the first steps estimate the"
                " second moment; use 15 to 25% of the run's steps"
            )
        check_settings(name, defaults)
        self.freeze_step, self.refresh_every = freeze_step, refresh_every
        self.communicator: CompressedAllReduce | None = None
        self.own: list[Tensor] | None = None
        self._steps: int | None = 0
        self._warned = False
        super().__init__(params, {**defaults, "frozen_at": 0})

    @property
    def steps(self) -> int:
        """Number of steps taken, those before a resume included."""
        if self._steps is None:
            self._steps = self._steps_in_state()
        return self._steps

    @property
    def compressing(self) -> bool:
        """Whether the running or next step is in the second stage."""
        return self.communicator is not None and self.steps >= self.freeze_step

    @property
    def takes_mean_gradients(self) -> bool:
        """Whether the gradients of the next step must be averaged over the ranks."""
        return not self.compressing or self._refreshing

    @property
    def _refreshing(self) -> bool:
        since = self.steps - self.freeze_step
        return self.refresh_every is not None and since > 0 and since % self.refresh_every == 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step.

        Args:
            closure: Function that computes gradients and returns the loss.

        Raises:
            DloError: A gradient is sparse, or in the second stage a parameter gets its first gradient.
        """
        loss = run_closure(closure)
        with torch.no_grad():
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if any(gradient.is_sparse for gradient in gradients):
                raise DloError(
                    f"gradients of {type(self).__name__} must be dense, got a sparse one; set sparse=False in its"
                    " Embedding"
                )
            if gradients:
                self._warn_once()
                if self.compressing:
                    self._freeze()
                    self.compressed_step()
                else:
                    for group in self.param_groups:
                        group["frozen_at"] = 0
                    self.warm_up_step()
                self._steps = self.steps + 1
        return loss

    @abstractmethod
    def warm_up_step(self) -> None:
        """Takes a step of the first stage, on averaged gradients."""

    @abstractmethod
    def compressed_step(self) -> None:
        """Takes a step of the second stage, from local gradients and with the same result on all ranks."""

    @abstractmethod
    def _steps_in_state(self) -> int:
        """Returns the number of steps in the state."""

    def momenta(self) -> list[Tensor]:
        """Returns the mean momenta, which the second stage averages, in the order of the parameters."""
        return [self.state[p]["exp_avg"] for group in self.param_groups for p in self.trained(group)]

    def own_momenta(self) -> list[Tensor]:
        """Returns this rank's local momenta, in the order of :meth:`momenta`."""
        if self.own is None:
            self.own = [momentum.clone() for momentum in self.momenta()]
        return self.own

    def refresh(self, group: dict[str, Any], variances: list[Tensor], gradients: list[Tensor]) -> None:
        """Updates a group's second moments, if this step's gradients are averaged over the ranks."""
        if self._refreshing and variances:
            beta2 = group["betas"][1]
            multiply_all(variances, beta2)
            torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
            group["frozen_at"] += 1

    def trained(self, group: dict[str, Any]) -> list[Tensor]:
        """Returns a group's parameters that had a gradient in the first stage, in order.

        Raises:
            DloError: Another parameter has a gradient now.
        """
        for parameter in group["params"]:
            if parameter.grad is not None and "exp_avg_sq" not in self.state.get(parameter, {}):
                raise DloError(
                    f"parameters of {type(self).__name__} must get gradients before step {self.freeze_step}, which"
                    f" freezes the second moment, got the first one of a parameter of shape {tuple(parameter.shape)}"
                    f" in step {self.steps + 1}; train all parameters from the start, or raise freeze_step"
                )
        return [p for p in group["params"] if "exp_avg_sq" in self.state.get(p, {})]

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a state, also that of an Adam or LAMB; compression errors start at zero."""
        super().load_state_dict(state_dict)
        self._steps = None
        self._forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The groups of another optimizer's state lack the settings of this one.
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def _freeze(self) -> None:
        """Records, once, the number of steps of which the second moments consist."""
        for group in self.param_groups:
            if not group["frozen_at"]:
                group["frozen_at"] = self.steps
                # Any local state is of steps that were undone, those of a rehearsal.
                self._forget()

    def _forget(self) -> None:
        """Drops the local state of this rank."""
        self.own = None
        if self.communicator is not None:
            self.communicator.reset()

    def _warn_once(self) -> None:
        if self.steps < self.freeze_step or self.communicator is not None or self._warned:
            return
        self._warned = True
        if not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() > 1 and dist.get_rank() == 0:
            warnings.warn(
                f"{type(self).__name__} has reached freeze_step={self.freeze_step} without a communicator, and"
                " continues uncompressed; add the callback GradientCompression(method: one_bit)",
                stacklevel=3,
            )


def check_settings(name: str, settings: dict[str, Any]) -> None:
    """Checks the settings that Adam and LAMB share.

    Raises:
        DloError: A value is out of range.
    """
    beta1, beta2 = settings["betas"]
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise DloError(f"betas of {name} must be in [0, 1), got {tuple(settings['betas'])}; use (0.9, 0.999)")
    for key in ("lr", "eps", "weight_decay"):
        check_number(f"{key} of {name}", settings[key], "at least 0", "use 0 or a positive number")


def gradients_of(parameters: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of parameters, with zeros for missing ones."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def frozen_denominators(variances: list[Tensor], correction: float, eps: float, least: float) -> Iterator[Tensor]:
    """Yields the denominators of the step: the root of the frozen second moment, with a floor.

    An element with almost no gradient in the first stage, such as one of a token that had not occurred, would take an
    arbitrarily long step at its first gradient. So each root is at least a fraction of the tensor's root mean.

    Args:
        variances: Frozen second moments.
        correction: Bias correction, 1 - beta2^steps.
        eps: Constant that is added to the root.
        least: Smallest root, as a fraction of the root of the tensor's mean.
    """
    for variance in variances:
        root = (variance / correction).sqrt_()
        floor = (variance.mean() / correction).sqrt_() * least
        yield root.clamp_min_(floor).add_(eps)


def limit_rms_(tensors: list[Tensor], limit: float) -> None:
    """Scales tensors, in place, down to a maximum root mean square, without waiting for the device.

    Shazeer, Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018 (arXiv 1804.04235), section 6:
    it shortens steps that are too long because the second moment is out of date.
    """
    norms = torch._foreach_norm(tensors)
    scales = [
        (limit * max(1, tensor.numel()) ** 0.5 / norm).clamp_(max=1.0).nan_to_num_(1.0)
        for tensor, norm in zip(tensors, norms, strict=True)
    ]
    multiply_all(tensors, scales)


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
                copy_all(averages[-1], momenta)
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
        multiply_all(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, torch._foreach_mul(averages, rates))
        multiply_all(averages, roots)

    def _steps_in_state(self) -> int:
        return int(max((float(state["step"]) for state in self.state.values() if "step" in state), default=0))


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
            :class:`~dlo_plugins.compression.one_bit.OneBitAdam`.
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
