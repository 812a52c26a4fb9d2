"""Carries torch's thread-local state to another thread, as autograd carries it to the threads of its devices."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch.utils import _python_dispatch


class ThreadState:
    """State of the calling thread, in which another thread can run a function.

    It has the grad mode, autocast, the modes of operations and functions, the hooks for saved tensors, the context
    variables, and the device with its current stream. The nesting of autocast counts too: at its outermost exit,
    autocast drops all threads' casts of weights.

    A reach into torch 2.11 to 2.15, which has no public functions for the stacks of modes and hooks.

    Args:
        device: Device on which the function computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._context = device, contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(kind)]
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._operations = _python_dispatch._get_current_dispatch_mode_stack()
        self._functions = overrides._get_current_function_mode_stack()
        self._hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self._stream = None if self._module is None else self._module.current_stream(device)

    def run(self, function: Callable[[], None]) -> None:
        """Calls a function in this state; the calling thread is as before afterwards, but for its device and stream."""
        self._context.run(self._run, function)

    def _run(self, function: Callable[[], None]) -> None:
        with contextlib.ExitStack() as undo:
            if self._module is not None:
                self._module.set_device(self._device)
                self._module.set_stream(self._stream)
            undo.enter_context(torch.set_grad_enabled(self._grad))
            for kind, enabled, dtype in self._autocast:
                undo.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
                undo.callback(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind))
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            undo.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(self._caches_casts)
            torch.autocast_increment_nesting()
            undo.callback(torch.autocast_decrement_nesting)
            if self._hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)
                undo.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            for mode in self._functions:
                overrides._push_mode(mode)
                undo.callback(overrides._pop_mode)
            for mode in self._operations:
                _python_dispatch._push_mode(mode)
                undo.callback(_python_dispatch._pop_mode, getattr(mode, "_mode_key", None))
            function()


#: Notes by which torch.compile knows whether a mode of operations is entered.
_NOTES = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def get_mode_notes() -> tuple[bool, ...]:
    """Returns torch's notes of the modes of operations that are entered.

    They are of all threads (torch 2.11 to 2.15). Each mode restores on exit those of its entry, so that threads that
    take turns inside modes, as those of selective recomputation, would leave them wrong.
    """
    return tuple(getattr(_python_dispatch, note) for note in _NOTES)


def set_mode_notes(notes: tuple[bool, ...]) -> None:
    """Sets torch's notes of the modes of operations that are entered."""
    for note, value in zip(_NOTES, notes, strict=True):
        setattr(_python_dispatch, note, value)
    set_is_in_mode_without_ignore_compile_internals(notes[-1])
