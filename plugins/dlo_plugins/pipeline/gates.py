"""Forward of a single stage: the model's own forward, with placeholders for the modules of other stages.

The forward starts at its beginning on every stage, with the micro-batch's own arguments. So every stage has what the
model computes from them (masks, angles, positions), and only the hidden state is sent. While it runs:

- a module of the stem, and a block of an earlier stage, is not called; it returns zeros of its output's shape;
- the stage's first block is called with the received hidden state as its first argument;
- the forward ends where the next stage's first block would be called: that block's first argument is sent.

So the code between two blocks runs in the stage of the earlier block. If the forward uses anything else from earlier
stages (for example in a skip connection around a block), it would use zeros in place of values: :mod:`.skip_check`
finds that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_plugins.pipeline.model_stages import Stages
from dlo_plugins.pipeline.skip_check import SkipCheck


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device, dense: bool) -> Tensor:
        """Returns zeros; unless `dense`, they share the memory of one element, which must not be written to."""
        if dense:
            return torch.zeros(self.size, dtype=self.dtype, device=device)
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.size)


@dataclass
class StageShapes:
    """Shapes that the modules of earlier stages return, for micro-batches of one shape.

    Attributes:
        returned: Output of each call in one forward, by module, with a :class:`TensorShape` for each tensor.
    """

    returned: dict[str, list[Any]] = field(default_factory=dict)


class _StageEnd(Exception):
    """Ends a stage's forward at the first block of the next stage."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class StageForward:
    """One forward of a stage.

    Args:
        model: Full model.
        stages: Stages of the model.
        stage: Number of the stage that runs.
        device: Device of the stage.
        received: Hidden state from the previous stage; None in the first.
        shapes: Shapes that the modules of earlier stages return.
        record: Whether to record the shapes that this stage's modules return.
        check: Check for uses of placeholders; None turns it off.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        stage: int,
        device: torch.device,
        received: Tensor | None,
        shapes: StageShapes,
        record: bool,
        check: SkipCheck | None,
    ) -> None:
        self.model, self.stages, self.stage, self.device = model, stages, stage, device
        self.received, self.shapes, self.record, self.check = received, shapes, record, check
        self.entered = -1  # Number of the block that was called last.
        #: Shapes that the modules of this stage and of earlier ones return; complete if `record` is set.
        self.known = StageShapes({name: list(calls) for name, calls in shapes.returned.items()})

    def run(self, forward: Callable[[], Any]) -> Any:
        """Returns the hidden state for the next stage; in the last stage, the output of `forward`.

        Raises:
            DloError: If the forward does not call each block once and in order.
        """
        last = self.stage + 1 == self.stages.count
        with self._gates(), self.check or contextlib.nullcontext():
            try:
                outputs = forward()
            except _StageEnd as end:
                return end.hidden
        wanted = self.stages.first[self.stage + 1] - last
        if self.entered < wanted:
            raise DloError(
                "a forward must call each block once in a pipeline, got one that ended without"
                f" '{self.stages.blocks[self.entered + 1]}'; turn off what skips blocks, or train with pp=1"
            )
        return outputs

    @contextlib.contextmanager
    def _gates(self) -> Iterator[None]:
        """Replaces modules by gates inside the block, and restores them after it."""
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
            yield from ((name, self._placeholder) for name in self.stages.stem_units)
            yield from ((name, self._placeholder) for name in self.stages.blocks[:first])
        elif self.record:
            yield from ((name, self._recorded) for name in self.stages.stem_units)
        yield from ((name, self._block) for name in self.stages.blocks[first:end])
        yield from ((name, self._exit) for name in self.stages.blocks[end:])

    def _zeros(self, name: str, parameter: Tensor) -> Tensor:
        value = TensorShape(tuple(parameter.shape), parameter.dtype).zeros(self.device, dense=False)
        if self.check is not None:
            self.check.mark(value, name)
        return value

    def _placeholder(self, name: str, module: nn.Module) -> nn.Module:
        is_block = name in self.stages.blocks
        calls = iter(self.shapes.returned.get(name, ()))

        def placeholder(*args: Any, **kwargs: Any) -> Any:
            try:
                value = _mapped(next(calls), TensorShape, lambda shape: shape.zeros(self.device, dense=True))
            except StopIteration:
                raise DloError(self._extra_call_message(name, is_block)) from None
            if is_block:
                self._enter(name)
            if self.check is not None:
                _mapped(value, Tensor, lambda tensor: self.check.mark(tensor, name))  # type: ignore[union-attr]
            return value

        return _Gate(module, placeholder, lambda leaf, tensor: self._zeros(f"{name}.{leaf}", tensor))

    def _extra_call_message(self, name: str, is_block: bool) -> str:
        """Returns the message for a module of an earlier stage that is called more often than in that stage."""
        if is_block or self.entered < 0:
            return (
                "a forward must call each module equally often for micro-batches of one shape, got one that calls"
                f" '{name}' more often; remove what depends on values, or train with pp=1"
            )
        return (
            f"a pipeline's stem must run before the first block, got a forward that calls '{name}' after"
            f" '{self.stages.blocks[self.entered]}'; name it in the plan's head, or among its blocks if it runs between"
            " two of them (Task.parallel_plan)"
        )

    def _recorded(self, name: str, module: nn.Module) -> nn.Module:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            returned = module(*args, **kwargs)
            self._record_shape(name, returned)
            return returned

        return _Gate(module, recorded)

    def _block(self, name: str, module: nn.Module) -> nn.Module:
        is_first = self.received is not None and self.stages.blocks.index(name) == self.stages.first[self.stage]

        def block(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            if is_first:
                args, kwargs = _with_hidden(args, kwargs, self.received)
                if self.check is not None:
                    self.check.mark_received()
            if self.check is not None:
                self.check.check_arguments((args, kwargs), name)
            returned = module(*args, **kwargs)
            if self.record:
                self._record_shape(name, returned)
            return returned

        return _Gate(module, block)

    def _exit(self, name: str, module: nn.Module) -> nn.Module:
        def leave(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            hidden = next(iter((*args, *kwargs.values())), None)
            if not isinstance(hidden, Tensor):
                raise DloError(
                    f"the first argument of a stage's first block must be a tensor, got {type(hidden).__name__} for"
                    f" '{name}'; pass the hidden state first, or train with pp=1"
                )
            raise _StageEnd(hidden)

        return _Gate(module, leave)

    def _enter(self, name: str) -> None:
        """Records and checks that a block is called."""
        number = self.stages.blocks.index(name)
        if number != self.entered + 1:
            expected = self.stages.blocks[min(self.entered + 1, len(self.stages.blocks) - 1)]
            raise DloError(
                f"a forward must call each block once and in the plan's order in a pipeline, got '{name}' in place of"
                f" '{expected}'; turn off what skips or repeats blocks, or train with pp=1"
            )
        self.entered = number
        if self.check is not None:
            self.check.place = name

    def _record_shape(self, name: str, returned: Any) -> None:
        shape = _mapped(returned, Tensor, lambda tensor: TensorShape(tuple(tensor.shape), tensor.dtype))
        self.known.returned.setdefault(name, []).append(shape)


class _Gate(nn.Module):
    """Module that replaces another one: it has the other's attributes, and a call of its own.

    Args:
        module: Module that it replaces.
        call: Function that it calls.
        absent: Returns a placeholder of a parameter or buffer that this stage does not have, by its name.
    """

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], absent: Callable[[str, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self._call = call
        self._absent = absent

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        if name in modules:
            return modules[name]
        value, absent = getattr(modules["module"], name), self.__dict__["_absent"]
        if absent is not None and isinstance(value, Tensor) and value.is_meta:  # As in `places.weight[:n]`.
            return absent(name, value)
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a block's arguments with the hidden state as the first of them."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): hidden}


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns a value with each item of a class changed, inside lists, tuples and dicts too.

    Strings, numbers and booleans are kept; anything else becomes None.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        items = [_mapped(item, kind, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _mapped(item, kind, change) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool) else None
