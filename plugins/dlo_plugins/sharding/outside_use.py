"""Detects parameters that are used outside their unit's forward: in a step, as by a penalty, or in a hook."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

from lightning.pytorch import Callback, LightningModule, Trainer
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from dlo_framework.batches import tree_leaves

#: Functions that do not read values: they may be called on a parameter whose memory is freed.
_NOT_VALUES = {"__hash__", "__len__", "__set__", "__delete__", "data_ptr", "dim", "element_size", "get_device"}
_NOT_VALUES |= {
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_pinned",
    "is_shared",
    "is_signed",
    "ndimension",
}
_NOT_VALUES |= {"nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size"}
_NOT_VALUES |= {"storage_offset", "stride", "untyped_storage"}
#: Attributes that are tensors; all others describe shape, dtype and device.
_TENSORS = {"data", "T", "H", "mT", "mH", "real", "imag"}


class LowestMode(TorchFunctionMode):
    """Mode around user code, below all others: a hook may enter modes that outlast it, and leave older ones."""

    def __enter__(self) -> Self:
        """Enters the mode below all others."""
        for mode in [self, *_left_modes()]:
            _push_mode(mode)
        return self

    def __exit__(self, *_: Any) -> None:
        """Leaves the mode, wherever it is now."""
        for mode in _left_modes():
            if mode is not self:
                _push_mode(mode)


class OutsideUse(LowestMode):
    """Calls ``on_use`` with the id of each parameter just before its values are used, and whether by its ``data``.

    The mode intercepts every torch function that is called on a tensor, which costs a few microseconds each. So only
    the first step is watched; later steps use the same parameters.

    Args:
        watched: Ids of the parameters.
        on_use: Callback that gets a parameter's id, and whether its ``data`` are read, before the function runs.
    """

    def __init__(self, watched: set[int], on_use: Callable[[int, bool], None]) -> None:
        super().__init__()
        self.watched, self.on_use = watched, on_use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reports the watched parameters among the arguments, and calls the function."""
        kwargs = kwargs or {}
        by_data = attribute_of(func) == "data"
        assigns = by_data and func.__name__ == "__set__" and not calling_module().startswith(ASKING)
        if assigns or uses_values(func):
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self.watched:
                    self.on_use(id(leaf), by_data)
        return func(*args, **kwargs)


def _left_modes() -> list[TorchFunctionMode]:
    """Leaves all function modes; returns them, the outermost first (torch 2.11 to 2.15, as its ``DeviceContext``)."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]


def uses_values(function: Any) -> bool:
    """Returns whether a function that ``__torch_function__`` receives may read or write a tensor's values."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return attribute_of(function) in _TENSORS
    return name not in _NOT_VALUES


#: Functions between a use of a tensor and who asks for it: function modes, and the listing of a module's state.
_BETWEEN = ("__torch_function__", "on_use", "state_dict", "_save_to_state_dict")


def calling_module() -> str:
    """Returns the name of the module that has called a torch function, given to function modes inside each other.

    Of a module's ``state_dict`` it is the module that has asked for it, such as Lightning in a save.
    """
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name in _BETWEEN or frame.f_globals["__name__"] == "torch.overrides":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def attribute_of(function: Any) -> str:
    """Returns the name of the attribute that a function reads or writes; empty for other functions."""
    return str(getattr(getattr(function, "__self__", None), "__name__", ""))


#: Packages whose code reads weights through the strategy only.
ASKING = ("lightning.", "dlo_framework.", "dlo_plugins.", "dlo_tasks.")
#: Names of all hooks of a module or callback that run outside of its steps.
HOOKS = tuple(
    name for name in dir(LightningModule) if name.startswith("on_") or name in ("lr_scheduler_step", "optimizer_step")
)


def users_hooks(owners: Iterable[Any], names: Iterable[str] = HOOKS) -> Iterator[tuple[Any, str]]:
    """Yields each owner and name of a hook that the user has written.

    Args:
        owners: Module and callbacks.
        names: Names of hooks.
    """
    for owner in owners:
        for name in names:
            home = next((kind for kind in type(owner).__mro__ if name in vars(kind)), None)
            own = name in vars(owner)  # As LambdaCallback has them.
            if own or (home is not None and not home.__module__.startswith(ASKING)):
                yield owner, name


class HookContext:
    """Runs a hook of the user's inside a context.

    Args:
        owner: Module or callback.
        name: Name of the hook.
        around: Function that returns the context, given a description of the hook.
    """

    def __init__(self, owner: Any, name: str, around: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._owner, self._name, self._before = owner, name, vars(owner).get(name)
        hook, shown = getattr(owner, name), f"{name} of {type(owner).__name__}"

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            with around(shown):
                return hook(*args, **kwargs)

        vars(owner)[name] = call

    def remove(self) -> None:
        """Runs the hook as before."""
        if self._before is None:
            vars(self._owner).pop(self._name, None)
        else:
            vars(self._owner)[self._name] = self._before


def watch_hooks(trainer: Trainer, around: Callable[[str], AbstractContextManager[Any]]) -> list[HookContext]:
    """Runs all hooks of the user's code inside contexts, until these are removed."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners = [trainer.lightning_module, *callbacks]
    return [HookContext(owner, name, around) for owner, name in list(users_hooks(owners))]
