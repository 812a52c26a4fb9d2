"""What the optimizers that communicate their momentum have in common: two stages, and whom they communicate through."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.errors import DloError


class MomentumAverage(Protocol):
    """Takes means over the ranks; :class:`~dlo_plugins.compression.all_reduce.CompressedAllReduce` is one."""

    def average(self, tensors: list[Tensor]) -> None:
        """Replaces tensors by their mean, compressed or not, the same on all ranks."""

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean of a number."""

    def reset(self) -> None:
        """Forgets what is kept from one mean to the next."""


class OneBitOptimizer(Optimizer):
    """An optimizer whose ranks exchange gradients in a first stage, and compressed momenta after it.

    For the first ``freeze_step`` steps gradients come averaged, and the step is the ordinary one. After that the
    second moment is frozen, gradients come as each rank has computed them, each rank keeps a momentum of its own, and
    what the step is made of is the mean of these, taken through ``communicator``. Without one (a single process) the
    first stage lasts for ever.

    The state holds the mean momenta, the same on all ranks, so that any other optimizer can go on from it; a rank's own
    are in :attr:`own`.

    A parameter without a gradient is left alone in the first stage, and in the second counts as one whose gradient is
    zero; where no parameter has one (the step is left out) nothing happens.

    Args:
        params: parameters, or groups of them.
        defaults: of the groups' settings.
        freeze_step: steps of the first stage.
        refresh_every: so many steps apart, the second moment is brought up to date in the second stage; None never.

    Attributes:
        communicator: given by whoever knows the ranks.
        freeze_step: as given; not part of the state, so that a resumed run may have another.
        own: this rank's momenta, in the order of :meth:`momenta`; None where they are to start at the mean ones.

    Raises:
        DloError: on values out of range.
    """

    def __init__(
        self, params: Any, defaults: dict[str, Any], freeze_step: int, refresh_every: int | None = None
    ) -> None:
        name = type(self).__name__
        if refresh_every is not None and refresh_every < 2:
            raise DloError(
                f"{name}: refresh_every is at least 2, given {refresh_every}: gradients are exchanged whole in such"
                " steps; 8 sends about a sixth of what Adam does"
            )
        if freeze_step < 1:
            raise DloError(
                f"{name}: freeze_step is at least 1, given {freeze_step}: the second moment is frozen as the first"
                " steps have found it; 15 to 25% of the run's steps are usual"
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
        """How many steps were taken, those of the run that was resumed included."""
        if self._steps is None:
            self._steps = self._steps_in_state()
        return self._steps

    @property
    def compressing(self) -> bool:
        """Whether the step that is being taken, or comes next, is of the second stage."""
        return self.communicator is not None and self.steps >= self.freeze_step

    @property
    def takes_mean_gradients(self) -> bool:
        """Whether the gradients of the step that comes next are to be averaged over the ranks."""
        return not self.compressing or self._refreshing

    @property
    def _refreshing(self) -> bool:
        since = self.steps - self.freeze_step
        return self.refresh_every is not None and since > 0 and since % self.refresh_every == 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step.

        Args:
            closure: computes gradients, and returns the loss.

        Raises:
            DloError: on sparse gradients, and in the second stage on a parameter that had no gradient in the first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if any(gradient.is_sparse for gradient in gradients):
                raise DloError(f"{type(self).__name__} takes dense gradients; give the embedding sparse=False")
            if gradients:
                self._tell_once()
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
        """Takes a step of the first stage, on gradients that are averaged."""

    @abstractmethod
    def compressed_step(self) -> None:
        """Takes a step of the second stage: each rank with its own gradients, all with the same result."""

    @abstractmethod
    def _steps_in_state(self) -> int:
        """Returns the number of steps that the state says."""

    def momenta(self) -> list[Tensor]:
        """Returns the momenta that the second stage averages, in order."""
        return [self.state[p]["exp_avg"] for group in self.param_groups for p in self.trained(group)]

    def own_momenta(self) -> list[Tensor]:
        """Returns this rank's momenta, in the order of :meth:`momenta`."""
        if self.own is None:
            self.own = [momentum.clone() for momentum in self.momenta()]
        return self.own

    def refresh(self, group: dict[str, Any], variances: list[Tensor], gradients: list[Tensor]) -> None:
        """Brings a group's second moments up to date, where this step's gradients are the mean of the ranks'."""
        if self._refreshing and variances:
            beta2 = group["betas"][1]
            torch._foreach_mul_(variances, beta2)
            torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
            group["frozen_at"] += 1

    def trained(self, group: dict[str, Any]) -> list[Tensor]:
        """Returns a group's parameters that had a gradient in the first stage, in order.

        Raises:
            DloError: if another one has a gradient now.
        """
        for parameter in group["params"]:
            if parameter.grad is not None and "exp_avg_sq" not in self.state.get(parameter, {}):
                raise DloError(
                    f"{type(self).__name__}: a parameter of shape {tuple(parameter.shape)} has its first gradient"
                    f" in step {self.steps + 1}, but the second moment is frozen since step {self.freeze_step}; let all"
                    " parameters train from the start, or raise freeze_step"
                )
        return [p for p in group["params"] if "exp_avg_sq" in self.state.get(p, {})]

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes a state, an Adam's or LAMB's too; errors of compression start at zero."""
        super().load_state_dict(state_dict)
        self._steps = None
        self._forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state of another optimizer brings groups without the settings that are this one's own.
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def _freeze(self) -> None:
        """Notes how many steps the second moments are of, once."""
        for group in self.param_groups:
            if not group["frozen_at"]:
                group["frozen_at"] = self.steps
                # What is there can only be of steps that were taken back: of a rehearsal.
                self._forget()

    def _forget(self) -> None:
        """Forgets what this rank alone knows."""
        self.own = None
        if self.communicator is not None:
            self.communicator.reset()

    def _tell_once(self) -> None:
        if self.steps < self.freeze_step or self.communicator is not None or self._warned:
            return
        self._warned = True
        if not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() > 1 and dist.get_rank() == 0:
            warnings.warn(
                f"{type(self).__name__} has reached freeze_step={self.freeze_step}, but nothing communicates for it: it"
                " goes on uncompressed. Add the callback GradientCompression(method: one_bit)",
                stacklevel=3,
            )


def check_settings(name: str, settings: dict[str, Any]) -> None:
    """Checks what Adam and its kin have in common.

    Raises:
        DloError: on values out of range.
    """
    beta1, beta2 = settings["betas"]
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise DloError(f"{name}: betas lie in [0, 1), given {tuple(settings['betas'])}; (0.9, 0.999) is usual")
    for key in ("lr", "eps", "weight_decay"):
        if not settings[key] >= 0:
            raise DloError(f"{name}: {key} is at least 0, given {settings[key]}")


def gradients_of(parameters: list[Tensor]) -> list[Tensor]:
    """Returns parameters' gradients; zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def frozen_denominators(variances: list[Tensor], correction: float, eps: float, least: float) -> Iterator[Tensor]:
    """Yields what the momentum is divided by: the root of the frozen second moment, kept from being next to nothing.

    An element that had no gradient to speak of in the first stage, such as a token's that had not occurred, would take
    a step of any length with its first. So no root is less than a part of the tensor's root mean.

    Args:
        variances: frozen second moments.
        correction: of their bias: 1 - beta2^steps.
        eps: is added.
        least: the smallest root, as a part of the root of the tensor's mean.
    """
    for variance in variances:
        root = (variance / correction).sqrt_()
        floor = (variance.mean() / correction).sqrt_() * least
        yield root.clamp_min_(floor).add_(eps)


def limit_rms_(tensors: list[Tensor], limit: float) -> None:
    """Scales tensors down, in place, whose root mean square is above a limit; waits for no device.

    Shazeer, Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018 (arXiv 1804.04235), section 6:
    against steps that are too long because the second moment is out of date.
    """
    norms = torch._foreach_norm(tensors)
    scales = [
        (limit * max(1, tensor.numel()) ** 0.5 / norm).clamp_(max=1.0).nan_to_num_(1.0)
        for tensor, norm in zip(tensors, norms, strict=True)
    ]
    torch._foreach_mul_(tensors, scales)
