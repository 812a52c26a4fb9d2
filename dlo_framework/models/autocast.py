"""Autocast state for any device type, including those without autocast (meta)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Returns the dtype of autocast on a device type; None where autocast is off."""
    # Compiled devices have autocast; torch.compile (2.11) cannot trace the question.
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if not has_autocast or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def no_autocast(kind: str) -> AbstractContextManager[object]:
    """Returns a context that turns autocast off on a device type."""
    if not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def uncached(kind: str) -> AbstractContextManager[object]:
    """Returns a context with the present autocast on a device type, without its cache of casts.

    A cast that is cached without gradients would be used where gradients are needed later.
    """
    dtype = autocast_dtype(kind)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=dtype, cache_enabled=False)
