"""Asynchronous copies between an accelerator's memory and the CPU's: one side stream for each direction."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CopyHandle:
    """Handle of a copy that has been started.

    Args:
        stream: Side stream of the copy; None if it is complete.
        module: Module of the stream's device, such as ``torch.cuda``.
    """

    def __init__(self, stream: Any = None, module: Any = None) -> None:
        self._stream, self._module = stream, module
        self._event = None if stream is None else stream.record_event()

    def wait(self) -> None:
        """Makes the current stream wait for the copy; the host does not wait."""
        if self._event is not None:
            self._module.current_stream(self._stream.device).wait_event(self._event)

    def synchronize(self) -> None:
        """Makes the host wait for the copy."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def has_ended(self) -> bool:
        """Whether the copy is complete, as the host sees it now."""
        return self._event is None or bool(self._event.query())

    def stream_context(self) -> AbstractContextManager[Any]:
        """Returns a context whose kernels run after the copy, concurrently with the current stream."""
        null_context: AbstractContextManager[Any] = contextlib.nullcontext()
        return null_context if self._stream is None else self._module.stream(self._stream)


class CopyStream:
    """Side stream of an accelerator for the copies in one direction.

    Args:
        device: Device of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device)

    def copy(self, target: Tensor, source: Tensor, records: bool = True) -> CopyHandle:
        """Starts a copy, which runs after all work that the current stream has so far.

        Until the copy has been waited for, write to neither tensor, and do not read the target.

        Args:
            target: Tensor of the source's shape.
            source: Tensor to copy. Tensors in the CPU's memory should be page-locked.
            records: Whether the tensors may be freed before the copy has been waited for. Their memory is then used
                again only once the host sees that the copy has ended.
        """
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if records and tensor.device.type != "cpu":
                tensor.record_stream(self._stream)
        return CopyHandle(self._stream, self._module)


class SyncCopies:
    """Synchronous replacement for a CopyStream on a CPU."""

    def copy(self, target: Tensor, source: Tensor, records: bool = True) -> CopyHandle:
        """Copies the source to the target before it returns."""
        target.copy_(source)
        return CopyHandle()


class CopyStreams(NamedTuple):
    """Side streams of a device.

    Attributes:
        up: Stream of copies to the device.
        down: Stream of copies to the CPU.
    """

    up: CopyStream | SyncCopies
    down: CopyStream | SyncCopies


@functools.cache
def copy_streams(device: torch.device) -> CopyStreams:
    """Returns the side streams of a device, the same ones at each call."""
    if device.type == "cpu":
        return CopyStreams(SyncCopies(), SyncCopies())
    return CopyStreams(CopyStream(device), CopyStream(device))


def empty_host_tensor(like: Tensor, device: torch.device) -> Tensor:
    """Returns an uninitialised tensor in the CPU's memory, page-locked for an accelerator.

    Args:
        like: Tensor whose shape, strides and dtype it has.
        device: Device that copies to and from it.
    """
    return torch.empty_like(like, device="cpu", pin_memory=device.type != "cpu", requires_grad=False)
