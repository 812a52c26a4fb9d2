"""Interception of blocks' calls, and the check that blocks can run together as one region.

A module's calls are intercepted with hooks and compiled code included, on this object alone. It gets a subclass of its
class, as torch's FSDP2 does, because hooks run in `Module.__call__`, which Python looks up on the class.

A region runs all its blocks when the model calls the first of them. The later blocks' calls return the region's output.
So the model must pass each block's output on to the next one unchanged, use it for nothing else, and give all blocks
the same other arguments. One forward shows it: each block's output is a tensor that notes its uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.batches import rebuild, tree_flatten, tree_map

#: Call that replaces a module's own: it gets the own call, and the arguments.
Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_HANDLER = "_dlo_call_handler"


class _Bound:
    """Handler of one module; a copy of the module keeps its own calls."""

    def __init__(self, module: nn.Module, handler: Handler) -> None:
        self.module, self.handler = module, handler

    def __deepcopy__(self, memo: Any) -> _Bound:
        return self


def intercept_calls(module: nn.Module, handler: Handler) -> None:
    """Makes calls of a module go to a handler, in place of an earlier one."""
    if _HANDLER not in module.__dict__:
        module.__class__ = _intercepted(type(module))  # type: ignore[arg-type]
    module.__dict__[_HANDLER] = _Bound(module, handler)


def restore_calls(module: nn.Module) -> None:
    """Makes calls of a module go to its own class again."""
    if module.__dict__.pop(_HANDLER, None) is not None:
        module.__class__ = type(module).__mro__[1]


def own_call(module: nn.Module) -> Callable[..., Any]:
    """Returns the call of a module without a handler."""
    kind = type(module).__mro__[1] if _HANDLER in module.__dict__ else type(module)
    return functools.partial(kind.__call__, module)


@functools.cache
def _intercepted(base: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = self.__dict__.get(_HANDLER)
        if bound is None or bound.module is not self:
            return base.__call__(self, *args, **kwargs)
        return bound.handler(functools.partial(base.__call__, self), args, kwargs)

    about = {
        "__call__": call,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), about)


#: Positional arguments of a call, and those by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Noted(Tensor):
    """Output of a block that notes whether anything but the next block uses it."""

    own: Tensor
    check: RegionCheck

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the use, and runs the function on the block's own output."""

        def replace(value: Any) -> Any:
            if isinstance(value, _Noted):
                value.__dict__["check"].note_use(getattr(func, "__name__", str(func)))
                return value.__dict__["own"]
            if isinstance(value, list | tuple):
                return rebuild(value, [replace(item) for item in value])
            return {key: replace(item) for key, item in value.items()} if isinstance(value, dict) else value

        return func(*replace(tuple(args)), **replace(kwargs or {}))


class RegionCheck:
    """Check of the calls of one chain of blocks.

    Args:
        names: Names of the blocks, in the order of the plan.

    Attributes:
        refusal: Why the blocks cannot run as regions; empty if they can, as far as their calls have shown.
    """

    def __init__(self, names: list[str]) -> None:
        self.names, self.refusal = names, ""
        self._other: tuple[Any, list[Any]] | None = None
        self._last = -1
        self._noted: _Noted | None = None

    def enter(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Checks a block's call, and returns its arguments with the previous block's own output.

        Args:
            index: Number of the block.
            args: Arguments of the call.
            kwargs: Arguments by name.
        """
        hidden, rest = split_hidden(args, kwargs)
        if index != (0 if self._last + 1 == len(self.names) else self._last + 1):
            self._refuse(f"the model does not call '{self.names[index]}' once and in the plan's order")
        elif index and hidden is not self._noted:
            self._refuse(f"the model changes the output of '{self.names[index - 1]}' before the next block")
        leaves, structure = tree_flatten(rest)
        if index == 0:
            self._other = structure, leaves
        elif self._other is None or structure != self._other[0] or not all(map(is_same, leaves, self._other[1])):
            self._refuse(f"'{self.names[index]}' gets other arguments than '{self.names[0]}'")
        self._last, self._noted = index, None
        own: Arguments = tree_map(_own, (args, kwargs))
        return own

    def leave(self, index: int, output: Any) -> Any:
        """Returns a block's output in a form that notes its uses, unless it is the last block's."""
        if not isinstance(output, Tensor) or type(output) is not Tensor:
            self._refuse(f"'{self.names[index]}' returns {type(output).__name__}, not one plain tensor")
            return output
        if index + 1 == len(self.names):
            return output
        with torch.no_grad():
            noted: Any = output.detach().as_subclass(_Noted)
        noted.__dict__.update(own=output, check=self)
        self._noted = noted
        return noted

    def note_use(self, operation: str) -> None:
        """Notes that an operation between two blocks uses a block's output."""
        self._refuse(f"the model uses the output of '{self.names[self._last]}' by '{operation}' between blocks")

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason


def _own(value: Any) -> Any:
    """Returns a block's own output in place of the tensor that notes its uses."""
    return value.__dict__["own"] if isinstance(value, _Noted) else value


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Returns a block's first argument, which is the hidden state, and its other arguments."""
    if args:
        return args[0], (args[1:], kwargs)
    first = next(iter(kwargs), None)
    return kwargs.get(first), ((), {key: value for key, value in kwargs.items() if key != first})  # type: ignore[arg-type]


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Any) -> Arguments:
    """Returns a block's arguments with another hidden state."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): hidden}


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two arguments are one object, or equal numbers or strings."""
    plain = int | float | str | bool | torch.dtype | torch.device
    return one is other or (isinstance(one, plain) and type(one) is type(other) and one == other)
