"""Optimizer steps and losses that are compiled with torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dlo_framework.distributed.fused_optimizers import IMPLEMENTATIONS
from dlo_framework.distributed.step_override import StepOverride, take_bare_step
from dlo_framework.errors import DloError

#: Values of parameter groups that a step does not read, or that are set for it.
_OTHERS = ("params", "lr", *IMPLEMENTATIONS, "initial_lr", "name", "lr_scale")


class CompiledOptimizer:
    """Replaces an optimizer's step by a compiled one until :meth:`restore`.

    During the step, the learning rates are tensors, and the foreach implementation is used: torch.compile makes one
    graph of its operations, and a new rate needs no new code. Outside the step, the rates are numbers, which schedulers
    and checkpoints know. Step hooks and closures are called as by torch, uncompiled.

    Args:
        optimizer: Optimizer of torch with a foreach implementation.
        **options: Options of :func:`torch.compile`.

    Raises:
        DloError: The optimizer has no foreach implementation.
    """

    def __init__(self, optimizer: Optimizer, **options: Any) -> None:
        name = type(optimizer).__name__
        if not all("foreach" in group for group in optimizer.param_groups):
            raise DloError(
                f"Compile: optimizer: true must have an optimizer with a foreach implementation, got {name}; use adamw"
                " or another one of torch.optim, or leave it out"
            )
        self.optimizer, self.on = optimizer, True
        self._compiled = torch.compile(self._step_without_hooks, **options)
        self._rates = [torch.tensor(0.0) for _ in optimizer.param_groups]
        self._values: list[dict[str, Any]] | None = None
        self._moved = False
        self._override = StepOverride(optimizer, self._update, lambda: self.on)

    def restore(self) -> None:
        """Gives the optimizer its own step back."""
        self._override.restore()

    def _update(self) -> None:
        if is_in_torch_dispatch_mode():  # Such as a count of FLOPs, under which torch.compile compiles nothing.
            self._step_without_hooks()
            return
        self._move_steps()
        self._replace_views()
        with self._compilable():
            self._compiled()

    def _step_without_hooks(self) -> None:
        take_bare_step(self.optimizer)

    def _move_steps(self) -> None:
        """Moves step counts to the parameters' device, where compiled code needs them; once."""
        if self._moved:
            return
        self._moved = True
        for parameter, state in self.optimizer.state.items():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(parameter.device)

    def _replace_views(self) -> None:
        """Replaces gradients that are views, as of a DDP bucket, by tensors of the same memory: torch 2.11 needs it."""
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter.grad._is_view():
                parameter.grad = parameter.grad.detach()

    @contextlib.contextmanager
    def _compilable(self) -> Iterator[None]:
        """Sets the parameter groups' values for the compiled code, and restores them."""
        groups = self.optimizer.param_groups
        self._check_values()
        keys = ("lr", *IMPLEMENTATIONS)
        held = [{key: group[key] for key in keys if key in group} for group in groups]
        try:
            for number, group in enumerate(groups):
                device = next((p.device for p in group["params"]), torch.device("cpu"))
                if number == len(self._rates):
                    self._rates.append(torch.tensor(0.0))
                if self._rates[number].device != device:
                    self._rates[number] = self._rates[number].to(device)
                group["lr"] = self._rates[number].fill_(group["lr"])
                chosen = {"foreach": True, "fused": False, "capturable": True}  # Only so may the rate be a tensor.
                group.update({key: value for key, value in chosen.items() if key in group})
            yield
        finally:
            for group, values in zip(groups, held, strict=True):
                group.update(values)

    def _check_values(self) -> None:
        """Checks that values are those of the first step, for which the code was compiled.

        Raises:
            DloError: Another value than the learning rate has changed.
        """
        values = [
            {key: value for key, value in group.items() if key not in _OTHERS and not isinstance(value, Tensor)}
            for group in self.optimizer.param_groups
        ]
        known, self._values = self._values, values
        for before, now in zip(known or [], values, strict=False):
            for key, value in now.items():
                if before.get(key, value) != value:
                    raise DloError(
                        f"Compile: optimizer: true must have constant parameter groups but for lr, got {key}"
                        f" {before[key]} and then {value}, for which each step would be compiled again; set"
                        " cycle_momentum: false of OneCycle, or leave it out"
                    )


class CompiledLoss:
    """Replaces the method `loss` of a task by a compiled one until :meth:`restore`.

    Args:
        task: Task.
        **options: Options of :func:`torch.compile`.
    """

    def __init__(self, task: Any, **options: Any) -> None:
        self.task, self.on = task, True
        self._plain = task.loss
        self._compiled = torch.compile(task.loss, **options)
        task.__dict__["loss"] = self

    def __call__(self, outputs: Any, batch: Any) -> Any:
        """Returns the loss of outputs for a batch."""
        return (self._compiled if self.on else self._plain)(outputs, batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledLoss:
        return self  # A copy of the task that is made during a fit computes the same.

    def restore(self) -> None:
        """Gives the task its own method back."""
        self.task.__dict__.pop("loss", None)
