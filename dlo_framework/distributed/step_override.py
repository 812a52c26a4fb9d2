"""Replacement of one optimizer's step that keeps its hooks, closures and schedulers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


class StepOverride:
    """Replaces an optimizer's step until :meth:`restore`.

    Hooks and closures are called in the order of torch's ``Optimizer.profile_hook_step`` (2.11 to 2.15). torch's
    schedulers read ``_wrapped_by_lr_sched`` and ``_opt_called``: without them they wrap the step, or warn.

    Args:
        optimizer: Optimizer.
        update: Function that updates the parameters, without gradients.
        enabled: Function that returns whether ``update`` takes the next step; else the optimizer's own step does.
    """

    def __init__(
        self, optimizer: Optimizer, update: Callable[[], None], enabled: Callable[[], bool] = lambda: True
    ) -> None:
        self.optimizer = optimizer
        self._original, self._own = optimizer.__dict__.get("step"), optimizer.step

        def step(closure: Callable[[], Any] | None = None) -> Any:
            if not enabled():
                return self._own() if closure is None else self._own(closure)
            return self._step(update, closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        step.update = update  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign]

    def restore(self) -> None:
        """Gives the optimizer its own step back."""
        if self._original is None:
            self.optimizer.__dict__.pop("step", None)
        else:
            self.optimizer.step = self._original  # type: ignore[method-assign]

    def _step(self, update: Callable[[], None], closure: Callable[[], Any] | None) -> Any:
        optimizer = self.optimizer
        args: tuple[Any, ...] = (optimizer,) if closure is None else (optimizer, closure)
        kwargs: dict[str, Any] = {}
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
            for before in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
                changed = before(optimizer, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            optimizer._opt_called = True  # type: ignore[attr-defined]
            with torch.no_grad():
                update()
            for after in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
                after(optimizer, args, kwargs)
        return loss


def overriding_update(optimizer: Optimizer) -> Callable[[], None] | None:
    """Returns the update of an optimizer whose step is replaced, which calls no hooks; else None."""
    update: Callable[[], None] | None = getattr(optimizer.__dict__.get("step"), "update", None)
    return update


def take_bare_step(optimizer: Optimizer) -> None:
    """Takes the step of an optimizer's class without torch's wrappers (2.11 to 2.15) for hooks and gradient mode."""
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    step(optimizer)
