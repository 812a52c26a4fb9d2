"""Gradients that an optimizer is about to step with, as shards of the parameters, under every strategy.

A strategy says which tensors its optimizers step on this rank, and which slices of the parameters they are. A callback
that changes gradients by unit or by element writes to these slices; nothing is gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dlo_framework.distributed.step_primitives import torch_optimizer
from dlo_framework.errors import DloError, shown_names
from dlo_framework.recompute import in_backward
from dlo_framework.shards import Shard
from dlo_framework.strategy_contract import ForeignStrategy, contract_of
from dlo_framework.watch.flops import is_compiled
from dlo_plugins.sharding.outside_use import calling_module, watch_hooks

#: Packages whose code reads gradients of parameters in their places, or only drops them.
_LIBRARIES = (
    "dlo_",
    "deepspeed.",
    "torch.nn.modules.",
    "torch.optim.",
    "torch.autograd.",
    "torch.distributed.",
    "torch._",
)


@dataclass(frozen=True)
class SteppedGradient:
    """This rank's shards of a parameter and of its gradient.

    Attributes:
        name: Name of the parameter.
        weight: Shard that the optimizer steps.
        gradient: Shard of the gradient, which the optimizer steps with; None for a parameter without one.
    """

    name: str
    weight: Shard
    gradient: Shard | None


def stepped_gradients(strategy: Any, optimizer: Any) -> list[SteppedGradient]:
    """Returns the shards that an optimizer steps on this rank, to be called before a step.

    Args:
        strategy: Strategy of the run.
        optimizer: Optimizer of the run.
    """
    contract, found = contract_of(strategy), []
    for name, tensor in contract.optimizer_tensors(torch_optimizer(optimizer)).items():
        gradient = None if tensor.grad is None else contract.as_shard(name, tensor, tensor.grad)
        found.append(SteppedGradient(name, contract.as_shard(name, tensor, tensor.detach()), gradient))
    return found


def gradients_message(names: list[str]) -> str:
    """Returns the error message for parameters whose ``grad`` the user's code reads or sets where it has no effect."""
    return (
        "gradients that ranks shard must be read and changed through the optimizer, got the grad of the parameters"
        f" {shown_names(names)}; in on_before_optimizer_step use the tensors in optimizer.param_groups, which are this"
        " rank's shards; clip by the norm with gradient_clip_val or self.clip_gradients; or use strategy ddp"
    )


def check_groups(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Checks that no parameter was added to an optimizer whose parameters have been replaced by shards.

    Args:
        optimizer: Optimizer with shards in its parameter groups.
        names: Names of the module's parameters by id.

    Raises:
        DloError: One was added, which would not be trained.
    """
    added = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    if added:
        raise DloError(
            "an optimizer of shards must get its parameters in configure_optimizers, got"
            f" {shown_names(added)} from add_param_group; give it all from the start, in a group with lr 0 until it"
            " trains, or use strategy ddp"
        )


class UserAccess(TorchFunctionMode):
    """Refuses reads of the ``grad`` of parameters by the user's code, and finds writes through their ``data``.

    The gradients are in other tensors, those that the optimizer steps, so that code which changes them would change
    nothing; a backward's own hooks are an exception. The mode costs microseconds for each torch function.

    Args:
        names: Names of the parameters by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._data: list[tuple[str, Tensor, int]] = []  # what ``data`` returned, with its version counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises a DloError for the ``grad`` of one of the parameters; calls any other function."""
        attribute, name = getattr(func, "__self__", None), self._names.get(id(args[0])) if args else None
        if name is None or (attribute is not Tensor.grad and attribute is not Tensor.data):
            return func(*args, **(kwargs or {}))
        caller = calling_module()
        is_users = not caller.startswith(_LIBRARIES) and not in_backward()
        if is_users and attribute is Tensor.grad:
            raise DloError(gradients_message([name]))
        found = func(*args, **(kwargs or {}))
        if is_users:
            self._data.append((name, args[0], -1) if found is None else (name, found, found._version))
        return found

    def written(self) -> list[str]:
        """Returns the names of the parameters whose ``data`` were assigned to or written in place."""
        return list(dict.fromkeys(name for name, data, version in self._data if data._version != version))


class WatchedSteps:
    """Part of a strategy that watches what the user's code does to parameters and gradients.

    These are all hooks, the first training step, and with manual optimization each one from its first backward on.
    Compiled steps are not watched.
    """

    has_stepped = False
    _unwatched: contextlib.ExitStack | None = None  # A step by hand before its first backward.
    _stepping: tuple[contextlib.ExitStack, str] | None = None  # What watches a running optimizer_step, and its name.

    def watched_names(self) -> dict[int, str]:
        """Returns the names of the parameters whose gradients are in other tensors, by id; empty to watch none."""
        raise NotImplementedError

    def _guard_forwards(self, trainer: Trainer) -> None:
        """Watches forwards outside of steps, and the user's hooks."""
        super()._guard_forwards(trainer)  # type: ignore[misc]
        if self.watches_hooks:
            self._guards += watch_hooks(trainer, self._watch_hook)  # type: ignore[attr-defined]

    @property
    def watches_hooks(self) -> bool:
        """Whether parameters have no values between uses, or are copies of weights in higher precision."""
        raise NotImplementedError

    def around_hook(self, hook: str) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a hook of the user's, if these are watched."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _watch_hook(self, hook: str) -> Iterator[None]:
        """Watches a hook of the user's; the step that ``optimizer_step`` takes inside itself is left out."""
        with contextlib.ExitStack() as watched:
            watched.enter_context(self.around_hook(hook))
            if hook.startswith("optimizer_step "):
                self._stepping = watched, hook
                watched.callback(setattr, self, "_stepping", None)
            yield

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Steps an optimizer, with forward and backward."""
        if self._stepping is None:
            return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        watched, hook = self._stepping
        watched.close()
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        watched.enter_context(self._watch_hook(hook))
        return result

    def check_written(self, names: list[str]) -> None:
        """Raises a DloError where parameters cannot be written through their ``data``; by default they can."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's training step."""
        module = self.lightning_module  # type: ignore[attr-defined]
        with contextlib.ExitStack() as step:
            if not is_compiled(module):
                step.callback(setattr, self, "_unwatched", None)
                if not self.has_stepped:
                    step.enter_context(self.guard_hooks())
                elif not module.automatic_optimization:
                    self._unwatched = step
            self.has_stepped = True
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a backward."""
        loss, step = super().backward(*args, **kwargs), self._unwatched  # type: ignore[misc]
        if step is not None:
            self._unwatched = None
            step.enter_context(self.guard_hooks())
        return loss

    @contextlib.contextmanager
    def guard_hooks(self, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Watches the user's code inside the block."""
        names = self.watched_names()
        if not names:
            yield
            return
        with UserAccess(names) as access:
            yield
        written = access.written()
        if written:
            self.check_written(written)


def is_divided(strategy: Any, stepped: list[SteppedGradient]) -> bool:
    """Returns whether ranks step slices of the parameters; the same on all ranks."""
    if (contract_of(strategy).zero_stage or 0) > 0:
        return True
    return any(isinstance(one.weight, DTensor) or not isinstance(one.weight, Tensor) for one in stepped)


def check_reachable(callback: str, trainer: Trainer) -> None:
    """Checks that a callback can read and change the gradients that the strategy steps with.

    Raises:
        DloError: The strategy is one of Lightning's that joins parameters in flat tensors, or keeps gradients where no
            callback can change them.
    """
    strategy = trainer.strategy
    contract, name = contract_of(strategy), type(trainer.strategy).__name__
    if isinstance(contract, ForeignStrategy) and isinstance(strategy, FSDPStrategy | DeepSpeedStrategy):
        raise DloError(
            f"{callback}: strategy must say which slices of the parameters a rank steps, got {name} of Lightning, which"
            " joins parameters in flat tensors; use ddp, zero1 to zero3, fsdp, MeshStrategy or DeepSpeedBridge"
        )
    if contract.gradient_scale() is None:
        raise DloError(
            f"{callback}: gradients must be in memory before a step, got {name} with offload_optimizer: nvme, which"
            " keeps them on the disk; set offload_optimizer: cpu, or leave the callback out"
        )


def scale_of(strategy: Any) -> float:
    """Returns the factor by which the gradients are scaled that callbacks see before a step."""
    scale = contract_of(strategy).gradient_scale()
    assert scale is not None, "check_reachable comes first"
    return scale


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype in which a device sums norms over ranks: double precision where it has it."""
    return torch.float32 if device.type == "mps" else torch.float64
