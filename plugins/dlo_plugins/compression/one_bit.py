"""Base class of optimizers that communicate their momentum: the two stages, and the compressed mean."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.errors import DloError, check_number
from dlo_framework.optimizers import run_closure


class MomentumAverage(Protocol):
    """Mean over the ranks, as :class:`~.compressed_all_reduce.CompressedAllReduce` computes it."""

    def average(self, tensors: list[Tensor]) -> None:
        """Replaces tensors in place by their mean, compressed or not, the same on all ranks."""

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean of a scalar over the ranks."""

    def reset(self) -> None:
        """Drops the state that is kept between means."""


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
        self.communicator: MomentumAverage | None = None
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
            torch._foreach_mul_(variances, beta2)
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
    torch._foreach_mul_(tensors, scales)
