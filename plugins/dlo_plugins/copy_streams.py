"""Copies between an accelerator's memory and the CPU's that run beside the computation: one stream a direction."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Copied:
    """A copy that has been started.

    Args:
        stream: the side stream that it runs on; None where it is done already.
        module: torch's module of the stream's device, such as ``torch.cuda``.
    """

    def __init__(self, stream: Any = None, module: Any = None) -> None:
        self._stream, self._module = stream, module
        self._event = None if stream is None else stream.record_event()

    def wait(self) -> None:
        """Has the current stream wait for the copy; the host goes on."""
        if self._event is not None:
            self._module.current_stream(self._stream.device).wait_event(self._event)

    def synchronize(self) -> None:
        """Has the host wait for the copy."""
        if self._event is not None:
            self._event.synchronize()

    def followed(self) -> AbstractContextManager[Any]:
        """Returns a context: what is launched inside runs after the copy, and beside the current stream."""
        found: AbstractContextManager[Any] = contextlib.nullcontext()
        return found if self._stream is None else self._module.stream(self._stream)


class CopyStream:
    """A side stream of an accelerator for the copies of one direction.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> Copied:
        """Starts a copy, once all that the current stream has been given is done.

        Until the copy has been waited for, neither tensor is written, and the target is not read.

        Args:
            target: of the source's shape; page-locked where it is in the CPU's memory, as is the source.
            source: what is copied.
        """
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.device.type != "cpu":
                tensor.record_stream(self._stream)
        return Copied(self._stream, self._module)


class InOrder:
    """In a CopyStream's place where the device is a CPU: each copy is done when it is started."""

    def copy(self, target: Tensor, source: Tensor) -> Copied:
        """Copies."""
        target.copy_(source)
        return Copied()


class CopyStreams(NamedTuple):
    """The side streams of a device.

    Attributes:
        up: to the device.
        down: to the CPU.
    """

    up: CopyStream | InOrder
    down: CopyStream | InOrder


@functools.cache
def copy_streams(device: torch.device) -> CopyStreams:
    """Returns the side streams of a device, the same ones whenever it is asked for them."""
    if device.type == "cpu":
        return CopyStreams(InOrder(), InOrder())
    return CopyStreams(CopyStream(device), CopyStream(device))


def host_tensor(like: Tensor, device: torch.device) -> Tensor:
    """Returns room in the CPU's memory for a tensor's values, page-locked where an accelerator copies to it.

    Args:
        like: gives shape, strides and dtype.
        device: what copies to and from it.
    """
    return torch.empty_like(like, device="cpu", pin_memory=device.type != "cpu", requires_grad=False)
