"""Steps of optimizers: torch's fused ones, hooks of wrappers, and replacements that keep hooks and schedulers.

AdamW, Adam and SGD of torch are fused (one kernel for all tensors) by default on an accelerator.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

#: Keys of a parameter group in torch's optimizers that choose the implementation.
IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
_FUSED = (Adam, AdamW, SGD)
#: Dtypes for which the CPU's fused kernels round as the loop over tensors does; for halves they round less often.
_ON_CPU = (torch.float32, torch.float64)


def prefer_fused(optimizer: Optimizer, module: nn.Module | None = None, *, on_cpu: bool = False) -> None:
    """Switches torch's AdamW, Adam or SGD to the fused step, unless the user has chosen an implementation.

    Plain AdamW is a loop over tensors on a CPU, and a few passes over memory on CUDA. A run on CPUs only keeps the
    loop: the two differ in the last bit, and a run on several ranks must equal a plain loop bit by bit.

    Args:
        optimizer: Optimizer as configured; optimizers of other classes are not changed.
        module: Module that is trained. With sparse gradients, which the fused step does not take, nothing changes.
        on_cpu: Whether to use the fused step for parameters in CPU memory too, such as offloaded ones.
    """
    if type(optimizer) not in _FUSED or not all(_takes(group, on_cpu) for group in optimizer.param_groups):
        return
    if module is not None and sparse_embeddings(module):
        return
    for group in optimizer.param_groups:
        group["fused"] = True
    if isinstance(optimizer, SGD):
        optimizer.register_step_pre_hook(_complete_momentum)


def sparse_embeddings(module: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Returns a module's embeddings whose weights get sparse gradients."""
    return [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse]


def disable_fused_unscale(optimizer: Any) -> None:
    """Makes the gradient scaler unscale gradients before the step of a fused optimizer, which could do so itself.

    Lightning (2.6) refuses to clip the gradients of an optimizer that unscales, also in bf16, where nothing is scaled;
    and ranks with shards would each decide alone whether to skip a step.
    """
    optimizer._step_supports_amp_scaling = False


def own_implementation(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a group's choice of implementation, which a loaded checkpoint must not change."""
    return {key: group[key] for key in IMPLEMENTATIONS if key in group}


def _takes(group: dict[str, Any], on_cpu: bool) -> bool:
    """Whether a parameter group can take the fused step, and the user has not chosen an implementation."""
    chosen = any(group.get(key) for key in IMPLEMENTATIONS) or group.get("foreach") is False
    chosen = chosen or group.get("fused") is False
    if chosen or any(isinstance(group.get(key), Tensor) for key in ("lr", "weight_decay")):
        return False
    if group.get("momentum") and group.get("dampening"):  # See _complete_momentum.
        return False
    return all(
        p.is_floating_point() and (p.is_cuda or (on_cpu and p.device.type == "cpu" and p.dtype in _ON_CPU))
        for p in group["params"]
    )


def _complete_momentum(optimizer: Optimizer, *_: Any) -> None:
    """Gives a zero momentum to SGD's parameters that get their first gradient later than others.

    torch's fused SGD (2.11 to 2.15) raises where some parameters have a momentum and others do not. Without dampening,
    the first step from a zero momentum equals the step without one.
    """
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]):
            continue
        stepped = [p for p in group["params"] if p.grad is not None]
        lacking = [p for p in stepped if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if lacking and len(lacking) < len(stepped):
            for parameter in lacking:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def add_step_hooks(optimizer: Optimizer) -> None:
    """Adds step hooks to an optimizer whose constructor does not call torch's, such as timm's Lookahead.

    torch's (2.15) constructor wraps the class's ``step`` to call the hooks; without it hooks can be registered, and are
    never called. This function wraps the instance's ``step``, which a scheduler may have wrapped before.
    """
    if getattr(optimizer.step, "hooked", False):
        return
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(optimizer).setdefault(hooks, OrderedDict())
    inner = optimizer.step

    @functools.wraps(inner)
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    vars(optimizer)["step"] = MethodType(hooked, optimizer)


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
    inspect.unwrap(type(optimizer).step)(optimizer)
