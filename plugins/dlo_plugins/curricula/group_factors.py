"""Steps an optimizer with other learning rates for some of its tensors, and without others, under every strategy.

Strategies that shard give the optimizer tensors of their own, and checkpoints name its parameter groups. So the groups
stay, and are divided only while the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dlo_framework.distributed.step_hooks import prepend_post_hook


class GroupFactors:
    """Divides an optimizer's parameter groups by learning rate for a step, and restores them after it.

    Args:
        optimizer: Optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._own: list[dict[str, Any]] | None = None
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._handle: RemovableHandle = prepend_post_hook(optimizer, lambda *_: self.restore())

    def divide(self, factor_of: Callable[[Tensor], float]) -> None:
        """Divides the groups for the next step.

        Args:
            factor_of: Function that returns the factor of a tensor's learning rate.
        """
        self.restore()
        divided: list[dict[str, Any]] = []
        for group in self.optimizer.param_groups:
            by_factor: dict[float, list[Tensor]] = {}
            for tensor in group["params"]:
                by_factor.setdefault(factor_of(tensor), []).append(tensor)
            for factor, tensors in by_factor.items():
                part = {**group, "params": tensors, "lr": group["lr"] * factor}
                self._parts.append((group, part))
                divided.append(part)
        self._own = list(self.optimizer.param_groups)
        self.optimizer.param_groups[:] = divided

    def restore(self) -> None:
        """Restores the groups, with the values that the step has changed in them, such as a counter."""
        if self._own is None:
            return
        for group, part in self._parts:
            group.update({key: value for key, value in part.items() if key not in ("params", "lr")})
        self.optimizer.param_groups[:] = self._own
        self._own, self._parts = None, []

    def remove(self) -> None:
        """Restores the groups, and stops following the optimizer."""
        self.restore()
        self._handle.remove()
