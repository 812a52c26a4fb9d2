"""Gradients that an optimizer is about to step with, as shards of the parameters, under every strategy.

A strategy says which tensors its optimizers step on this rank, and which slices of the parameters they are. A callback
that changes gradients by unit or by element writes to these slices; nothing is gathered.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dlo_framework.costs import is_compiled
from dlo_framework.distributed.step_primitives import torch_optimizer
from dlo_framework.errors import DloError, shown_names
from dlo_framework.models.recompute import in_backward
from dlo_framework.shards import Box, Shard, held_boxes
from dlo_framework.strategy_abilities import SeparateParameters
from dlo_framework.strategy_contract import contract_of
from dlo_plugins.parallel.user_code import attribute_of, calling_module, watch_hooks

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
    contract, stepped = contract_of(strategy), []
    for name, tensor in contract.optimizer_tensors(torch_optimizer(optimizer)).items():
        gradient = None if tensor.grad is None else contract.as_shard(name, tensor, tensor.grad)
        stepped.append(SteppedGradient(name, contract.as_shard(name, tensor, tensor.detach()), gradient))
    return stepped


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
        attribute, name = attribute_of(func), self._names.get(id(args[0])) if args else None
        if name is None or attribute not in ("grad", "data"):
            return func(*args, **(kwargs or {}))
        caller = calling_module()
        is_users = not caller.startswith(_LIBRARIES) and not in_backward()
        if is_users and attribute == "grad":
            raise DloError(gradients_message([name]))
        tensor = func(*args, **(kwargs or {}))
        if is_users:
            self._data.append((name, args[0], -1) if tensor is None else (name, tensor, tensor._version))
        return tensor

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
    contract, name = contract_of(trainer.strategy), type(trainer.strategy).__name__
    contract.ability(SeparateParameters, callback)
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


def unit_norms(tensor: Tensor) -> Tensor:
    """Returns the 2-norm of each unit of a parameter or its gradient, in a shape that broadcasts with it.

    A unit is the slice of the parameter that computes one output feature: a row of a linear layer's weight, a filter of
    a convolution. A vector, such as a bias or the gain of a norm, is one unit. Half precision is summed in float32.
    """
    dim = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=tensor.ndim > 1, dtype=dtype)


class UnitNorms:
    """Norms of the units of parameters that ranks divide; made and called on all ranks.

    Args:
        names: Names of the parameters, in an order that is the same on all ranks.
        stepped: This rank's shards of some of them.
        device: Device of collectives.
        group: Ranks that have the same gradients together; None for all.

    Attributes:
        names: Names of the parameters.
        sizes: Number of units of each parameter.
    """

    def __init__(
        self,
        names: Sequence[str],
        stepped: Sequence[SteppedGradient],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.names, self._device, self._group = list(names), device, group
        numbers = {name: number for number, name in enumerate(self.names)}
        shapes = torch.zeros(2, len(self.names), dtype=torch.int64)
        for one in stepped:
            shape = one.weight.shape
            units = shape[0] if len(shape) > 1 else 1
            shapes[:, numbers[one.name]] = torch.tensor([units, math.prod(shape[1:]) if len(shape) > 1 else sum(shape)])
        shapes = shapes.to(device)
        dist.all_reduce(shapes, dist.ReduceOp.MAX, group=group)
        self.sizes = shapes[0].tolist()
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        self._starts = dict(zip(self.names, ends, strict=False))
        self._count, self._numbers = ends[-1], numbers
        held = self._zeros(self._count)
        for one in stepped:
            for box, _ in held_boxes(one.weight):
                self._part(held, one.name, box).add_(box.numel / max(1, box.sizes[0] if len(box.sizes) > 1 else 1))
        dist.all_reduce(held, group=group)
        elements = torch.repeat_interleave(shapes[1].clamp(min=1), shapes[0], output_size=self._count)
        #: Number of copies of each unit among the ranks.
        self.copies = held / elements
        self.copies.clamp_(min=torch.finfo(held.dtype).tiny)  # A unit without elements has none.

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=accumulation_dtype(self._device), device=self._device)

    def _part(self, values: Tensor, name: str, box: Box) -> Tensor:
        """Returns the entries of a box's units in a tensor of all units."""
        start = self._starts[name]
        if len(box.sizes) < 2:
            return values[start : start + 1]
        return values[start + box.offsets[0] : start + box.offsets[0] + box.sizes[0]]

    @torch.no_grad()
    def measure(self, stepped: Sequence[SteppedGradient]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the norms of all units' weights and gradients, and whether a unit's parameter has a gradient.

        Args:
            stepped: This rank's shards.
        """
        sums = self._zeros(2 * self._count + len(self.names))
        weights, gradients, used = sums.split([self._count, self._count, len(self.names)])
        for one in stepped:
            self._add_squares(weights, one.name, one.weight)
            if one.gradient is not None:
                self._add_squares(gradients, one.name, one.gradient)
                used[self._numbers[one.name]] = 1
        dist.all_reduce(sums, group=self._group)
        sizes = torch.tensor(self.sizes, device=self._device)
        is_used = torch.repeat_interleave(used > 0, sizes, output_size=self._count)
        return (weights / self.copies).sqrt_(), (gradients / self.copies).sqrt_(), is_used

    def _add_squares(self, sums: Tensor, name: str, shard: Any) -> None:
        for box, view in held_boxes(shard):
            self._part(sums, name, box).add_(unit_norms(view).flatten().to(sums).square_())

    @torch.no_grad()
    def scale_(self, stepped: Sequence[SteppedGradient], factors: Tensor) -> None:
        """Multiplies each unit's gradient by its factor, in place.

        Args:
            stepped: This rank's shards.
            factors: Factors of all units.
        """
        by_device = {factors.device: factors}
        for one in stepped:
            for box, view in held_boxes(one.gradient) if one.gradient is not None else ():
                if view.device not in by_device:
                    by_device[view.device] = factors.to(view.device)
                own = self._part(by_device[view.device], one.name, box)
                view.mul_(own.view(-1, *(1,) * (view.ndim - 1)) if view.ndim > 1 else own.view(()))
