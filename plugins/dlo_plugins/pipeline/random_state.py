"""Random states of the CPU and of a device, which recomputation sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

#: States of the CPU and of the device; None without a device of its own.
RandomState = tuple[Tensor, Tensor | None]


def get_random_state(device: torch.device) -> RandomState:
    """Returns the random states of the CPU and of a device."""
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


@contextlib.contextmanager
def restored_random(state: RandomState, device: torch.device) -> Iterator[None]:
    """Sets random states inside the block, and restores those of before after it."""
    before = get_random_state(device)
    set_random_state(state, device)
    try:
        yield
    finally:
        set_random_state(before, device)


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Sets the random states of the CPU and of a device."""
    of_cpu, of_device = state
    torch.set_rng_state(of_cpu)
    if of_device is not None:
        torch.get_device_module(device).set_rng_state(of_device, device)
