"""Schedule-free AdamW, RAdam and SGD, of the package schedulefree (1.4).

The Road Less Scheduled. Defazio et al., 2024, arXiv 2405.15682.

Gradients are computed at ``y``, which the module holds in training; ``z`` is in the optimizer's state; evaluation uses
their average ``x``, which follows from both: ``x = y + (1 - 1/beta) (z - y)``. The callback
:class:`~dlo_plugins.schedules.schedule_free.ScheduleFree` puts it into the module, and tasks add that callback by
themselves. Here ``y`` is kept aside meanwhile and put back bit by bit, instead of being computed from ``x`` as the
package does: so the run does not depend on how often it is evaluated or saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.errors import DloError

try:
    import schedulefree
except ImportError as missing:
    raise DloError(
        f"schedule-free optimizers must have the package schedulefree, got {missing};"
        " pip install 'dlo_framework[optimizers]'"
    ) from missing


class ScheduleFreeOptimizer(Optimizer):
    """Base in front of one of schedulefree's classes.

    Attributes:
        attended: Whether the callback ScheduleFree has taken charge of evaluation and checkpoints.
    """

    #: Shows tasks that the learning rate must have no schedule.
    schedule_free = True
    #: Callback that evaluates and saves the average, which tasks add.
    callback = "dlo_plugins.schedules.schedule_free.ScheduleFree"

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.attended = False
        self._trained: list[Tensor] | None = None
        for group in self.param_groups:
            group["train_mode"] = True
        self.register_step_pre_hook(_check_attended)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group."""
        super().add_param_group(param_group)
        self.param_groups[-1]["train_mode"] = True

    @property
    def holds_average(self) -> bool:
        """Whether the parameters hold the average ``x``, and not ``y``."""
        return self._trained is not None

    def swap(self, *, average: bool) -> None:
        """Puts the average, or the trained weights, into the parameters; does nothing if they hold them.

        It is called like a step: a strategy's step hooks load the parameters before it, and publish them after it.
        """
        if self.holds_average != average:
            hooked: Any = Optimizer.profile_hook_step(_put_average if average else _put_trained)
            hooked(self)


@torch.no_grad()
def _put_average(optimizer: ScheduleFreeOptimizer) -> None:
    optimizer._trained = []
    for group in optimizer.param_groups:
        beta = group["betas"][0] if "betas" in group else group["momentum"]
        for parameter in group["params"]:
            optimizer._trained.append(parameter.detach().clone())
            z = optimizer.state.get(parameter, {}).get("z")
            if z is not None:
                parameter.lerp_(end=z.to(parameter.device), weight=1 - 1 / beta)


@torch.no_grad()
def _put_trained(optimizer: ScheduleFreeOptimizer) -> None:
    assert optimizer._trained is not None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, trained in zip(parameters, optimizer._trained, strict=True):
        parameter.copy_(trained)
    optimizer._trained = None


def _check_attended(optimizer: Any, *_: Any) -> None:
    if not optimizer.attended:
        raise DloError(
            f"trainer.callbacks must have ScheduleFree with {type(optimizer).__name__}, whose average is evaluated and"
            " saved, got none; add {class_path: ScheduleFree}"
        )


class AdamWScheduleFree(ScheduleFreeOptimizer, schedulefree.AdamWScheduleFree):
    """Schedule-free AdamW; its warm-up is the argument ``warmup_steps``."""


class RAdamScheduleFree(ScheduleFreeOptimizer, schedulefree.RAdamScheduleFree):
    """Schedule-free RAdam, which needs no warm-up."""


class SGDScheduleFree(ScheduleFreeOptimizer, schedulefree.SGDScheduleFree):
    """Schedule-free SGD."""
