"""Autocast on any kind of device, those without it (meta) included."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Returns what autocast casts to on a kind of device; None where it is off."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def no_autocast(kind: str) -> AbstractContextManager[object]:
    """Turns autocast off on a kind of device."""
    if not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
