"""Running a model's own forward for one stage: what other stages compute is stood in for while it runs.

The forward starts at its beginning on every stage, with the micro-batch's own arguments, so whatever it makes of them
(masks, angles, positions) is at hand everywhere, and only the hidden state travels. On its way:

- a module of the stem, and a block of an earlier stage, is not called; what it would return is zeros of that shape;
- the stage's first block is called with the received hidden state in place of its first argument;
- where the next stage's first block would be called, the forward ends: that block's first argument is what is sent.

So the code between two blocks runs where the earlier of them does. If anything else that depends on earlier stages is
used later (a skip connection around a block, say), zeros would stand where values should: :mod:`.leaks` finds that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_plugins.pipeline.cutting import Stages
from dlo_plugins.pipeline.leaks import LeakCheck


@dataclass(frozen=True)
class Shape:
    """What a tensor is like, without its values."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device, dense: bool) -> Tensor:
        """Returns zeros; unless `dense`, all of them in one element's memory, which nothing may write to."""
        if dense:
            return torch.zeros(self.size, dtype=self.dtype, device=device)
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.size)


@dataclass
class Shapes:
    """What the modules that a stage stands in for return, for micro-batches of one shape.

    Attributes:
        returned: by module, what each of its calls in one forward returned, tensors replaced by their :class:`Shape`.
    """

    returned: dict[str, list[Any]] = field(default_factory=dict)


class _Left(Exception):
    """The forward has come to the next stage's first block."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class Passage:
    """One forward of a stage.

    Args:
        model: the whole model.
        stages: of it.
        stage: that is computed.
        device: where.
        received: the hidden state from the previous stage; None in the first.
        shapes: what earlier stages' modules return.
        record: whether to note what this stage's modules return.
        check: finds uses of stood-in values; None does not look.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        stage: int,
        device: torch.device,
        received: Tensor | None,
        shapes: Shapes,
        record: bool,
        check: LeakCheck | None,
    ) -> None:
        self.model, self.stages, self.stage, self.device = model, stages, stage, device
        self.received, self.shapes, self.record, self.check = received, shapes, record, check
        self.entered = -1  # Number of the block that was called last.
        #: What this stage's modules and those before return; complete where `record` is set.
        self.known = Shapes({name: list(calls) for name, calls in shapes.returned.items()})

    def run(self, forward: Callable[[], Any]) -> Any:
        """Returns the hidden state for the next stage, or, in the last stage, what `forward` returns.

        Raises:
            DloError: if the forward calls the blocks otherwise than once each, in order.
        """
        last = self.stage + 1 == self.stages.count
        with self._gates(), self.check or contextlib.nullcontext():
            try:
                outputs = forward()
            except _Left as left:
                return left.hidden
        wanted = self.stages.first[self.stage + 1] - last
        if self.entered < wanted:
            raise DloError(
                f"a forward calls each block once; it ended without '{self.stages.blocks[self.entered + 1]}'. Train"
                " without what skips blocks, or with pp=1"
            )
        return outputs

    @contextlib.contextmanager
    def _gates(self) -> Iterator[None]:
        """Puts gates in the modules' places, and the modules back."""
        undo: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for name, make in self._plan():
                parent, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(parent)
                place: dict[str, Any] = module._modules if leaf in module._modules else module._parameters
                undo.append((place, leaf, place[leaf]))
                place[leaf] = make(name, place[leaf])
            yield
        finally:
            for place, leaf, value in reversed(undo):
                place[leaf] = value

    def _plan(self) -> Iterator[tuple[str, Callable[[str, Any], Any]]]:
        first, end = self.stages.first[self.stage], self.stages.first[self.stage + 1]
        if self.stage > 0:
            yield from ((name, self._zeros) for name in self.stages.stem_tensors)
            yield from ((name, self._stand_in) for name in self.stages.stem_units)
            yield from ((name, self._stand_in) for name in self.stages.blocks[:first])
        elif self.record:
            yield from ((name, self._recorded) for name in self.stages.stem_units)
        yield from ((name, self._block) for name in self.stages.blocks[first:end])
        yield from ((name, self._exit) for name in self.stages.blocks[end:])

    def _zeros(self, name: str, parameter: Tensor) -> Tensor:
        value = Shape(tuple(parameter.shape), parameter.dtype).zeros(self.device, dense=False)
        if self.check is not None:
            self.check.mark(value, name)
        return value

    def _stand_in(self, name: str, module: nn.Module) -> nn.Module:
        is_block = name in self.stages.blocks
        calls = iter(self.shapes.returned.get(name, ()))

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            try:
                value = _mapped(next(calls), Shape, lambda shape: shape.zeros(self.device, dense=True))
            except StopIteration:
                raise DloError(self._too_often(name, is_block)) from None
            if is_block:
                self._enter(name)
            if self.check is not None:
                _mapped(value, Tensor, lambda tensor: self.check.mark(tensor, name))  # type: ignore[union-attr]
            return value

        return _Gate(module, stand_in)

    def _too_often(self, name: str, is_block: bool) -> str:
        """Returns what to say of a module of an earlier stage that is called where that stage did not call it."""
        if is_block or self.entered < 0:
            return f"a forward called '{name}' oftener than with other micro-batches of this shape"
        return (
            f"a pipeline's stem must run before the first block, got a forward that calls '{name}' after"
            f" '{self.stages.blocks[self.entered]}'; name it in the plan's head, or among its blocks if it runs between"
            " two of them (Task.parallel_plan)"
        )

    def _recorded(self, name: str, module: nn.Module) -> nn.Module:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            returned = module(*args, **kwargs)
            self._note(name, returned)
            return returned

        return _Gate(module, recorded)

    def _block(self, name: str, module: nn.Module) -> nn.Module:
        is_first = self.received is not None and self.stages.blocks.index(name) == self.stages.first[self.stage]

        def block(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            if is_first:
                args, kwargs = _with_hidden(args, kwargs, self.received)
                if self.check is not None:
                    self.check.begin()
            if self.check is not None:
                self.check.look((args, kwargs), name)
            returned = module(*args, **kwargs)
            if self.record:
                self._note(name, returned)
            return returned

        return _Gate(module, block)

    def _exit(self, name: str, module: nn.Module) -> nn.Module:
        def leave(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            hidden = next(iter((*args, *kwargs.values())), None)
            if not isinstance(hidden, Tensor):
                raise DloError(
                    f"a pipeline sends one tensor from stage to stage, the first argument of a stage's first block;"
                    f" that of '{name}' is {type(hidden).__name__}"
                )
            raise _Left(hidden)

        return _Gate(module, leave)

    def _enter(self, name: str) -> None:
        """Notes that a block is called."""
        number = self.stages.blocks.index(name)
        if number != self.entered + 1:
            expected = self.stages.blocks[min(self.entered + 1, len(self.stages.blocks) - 1)]
            raise DloError(
                f"a forward calls the blocks once each and in the order of the plan; it calls '{name}' where"
                f" '{expected}' is next. Train without what skips or repeats blocks, or with pp=1"
            )
        self.entered = number
        if self.check is not None:
            self.check.place = name

    def _note(self, name: str, returned: Any) -> None:
        shape = _mapped(returned, Tensor, lambda tensor: Shape(tuple(tensor.shape), tensor.dtype))
        self.known.returned.setdefault(name, []).append(shape)


class _Gate(nn.Module):
    """Stands in a module's place, and is what it is but for being called."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a block's arguments with the hidden state as the first of them."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): hidden}


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns a value in which each item of a class, in lists, tuples and dicts too, is changed.

    What is neither such an item, nor a container, nor plain data becomes None.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        items = [_mapped(item, kind, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _mapped(item, kind, change) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool) else None
