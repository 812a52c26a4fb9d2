"""Interception of a module's calls, hooks and compiled code included, on this object alone.

The object gets a subclass of its class, as torch's FSDP2 does, because hooks run in `Module.__call__`, which Python
looks up on the class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

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
