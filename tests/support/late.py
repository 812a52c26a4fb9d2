"""Streams and collectives of an accelerator at their latest, on a CPU.

A copy or a collective takes effect only when something waits for it, or for a later one of its stream, and what it
writes is NaN until then. So a buffer that is written again too early, and a value that is read too early, change the
losses, as they do on an accelerator that is busy.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dlo_framework.copy_streams import CopyStreams
from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.parallel.context import shared_attention
from dlo_plugins.parallel.pipeline.exchange import Link
from dlo_plugins.parallel.zero import flat_group
from dlo_plugins.parallel.zero.strategy import ZeroStrategy

#: Device that is not the memory that models are offloaded to, though it is the same.
DEVICE = torch.device("cpu", 0)


class OnDevice(ZeroStrategy):
    """ZeRO whose ranks' device is not the memory that it offloads to."""

    @property
    def root_device(self) -> torch.device:
        return DEVICE


class LateWork:
    """What has been started, and runs when it is waited for.

    Args:
        queue: of the stream, in the order of starts.
        run: does the work.
    """

    def __init__(self, queue: deque[LateWork], run: Callable[[], Any]) -> None:
        self.queue, self.run, self.done, self.result = queue, run, False, None
        queue.append(self)

    def wait(self) -> Any:
        """Runs what is before it, and itself."""
        while not self.done:
            first = self.queue.popleft()
            first.result, first.done = first.run(), True
        return self.result


class LateCopied(LateWork):
    """A copy that has been started; see :class:`dlo_framework.copy_streams.CopyHandle`."""

    launching: LateCopied | None = None
    blocked = 0  # how often the host has waited for a copy that was not done

    def synchronize(self) -> None:
        """Runs what is before it, and itself, while the host waits."""
        LateCopied.blocked += not self.done
        self.wait()

    @contextlib.contextmanager
    def stream_context(self) -> Iterator[None]:
        """What is started inside runs after the copy."""
        LateCopied.launching = self
        try:
            yield
        finally:
            LateCopied.launching = None


class LateStream:
    """A side stream; see :class:`dlo_framework.copy_streams.CopyStream`."""

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()

    def copy(self, target: Tensor, source: Tensor, records: bool = True) -> LateCopied:
        """Starts a copy; a source that is freed meanwhile keeps its values, as `record_stream` has it."""
        target, source = target.detach(), source.detach()
        kept = source.clone() if records else source
        _spoil(target)

        def run() -> None:
            target.copy_(kept if source.numel() and not source.untyped_storage().nbytes() else source)

        return LateCopied(self.queue, run)


@contextlib.contextmanager
def late() -> Iterator[dict[str, int]]:
    """Has ZeRO's copies, and the collectives of all, run late inside the block; counts what was started."""
    streams, collectives = CopyStreams(LateStream(), LateStream()), deque[Any]()  # type: ignore[arg-type]
    started = {"copies": 0, "reduce_scatter": 0, "all_gather": 0}

    def late_streams(device: torch.device) -> CopyStreams:
        started["copies"] += 1
        return streams

    def of(name: str) -> Any:
        original = getattr(Communicator, name)

        def start(self: Communicator, buffer: Tensor, **options: Any) -> Any:
            started[name] += 1
            after = LateCopied.launching
            if name == "all_gather":
                own = self.segment(buffer)
                kept = own.clone()
                _spoil(buffer)
                if after is None:
                    own.copy_(kept)

            def run() -> Tensor:
                if after is not None:
                    after.wait()
                return original(self, buffer, **options).wait()

            return LateWork(collectives, run)

        return mock.patch.object(Communicator, name, start)

    with of("reduce_scatter"), of("all_gather"), mock.patch.object(flat_group, "copy_streams", late_streams):
        yield started


#: Collectives of tensor parallelism that are started and waited for apart.
_STARTED = ("start_all_reduce", "start_all_gather_parts", "start_reduce_scatter_parts")


class LateMessage:
    """Message of a pipeline that is there when it is waited for; one that is sent must not change until then.

    Args:
        work: Handle of the message.
        tensor: Tensor that is sent, or that is received into.
        buffer: Tensor that receives the values; None for a message that is sent.
    """

    def __init__(self, work: Any, tensor: Tensor, buffer: Tensor | None = None) -> None:
        self._work, self._tensor, self._buffer = work, tensor, buffer
        self._sent = tensor.detach().clone() if buffer is None else None

    def wait(self, *limit: Any) -> None:
        """Waits for the message."""
        self._work.wait(*limit)
        if self._sent is not None:
            assert torch.equal(self._sent.nan_to_num(), self._tensor.detach().nan_to_num()), "written while it is sent"
        elif self._buffer is not None:
            self._tensor.copy_(self._buffer)


@contextlib.contextmanager
def late_along_axes() -> Iterator[dict[str, int]]:
    """Has tensor, context and pipeline parallelism's messages run late inside the block; counts what was started."""
    queue, started = deque[Any](), dict.fromkeys((*_STARTED, "transfers", "sends", "receives"), 0)
    transfer, send, receive = shared_attention.start_transfer, Link.send, Link.receive

    def of(name: str) -> Any:
        original = getattr(Communicator, name)

        def start(self: Communicator, tensor: Tensor) -> Callable[[], Tensor]:
            started[name] += 1
            return LateWork(queue, lambda: original(self, tensor)()).wait

        return mock.patch.object(Communicator, name, start)

    def start_transfer(*args: Any) -> LateWork:
        started["transfers"] += 1
        return LateWork(queue, lambda: transfer(*args).wait())

    def send_late(self: Link, tensor: Tensor) -> Any:
        started["sends"] += 1
        return LateMessage(send(self, tensor), tensor)

    def receive_late(self: Link, tensor: Tensor) -> Any:
        started["receives"] += 1
        buffer = torch.empty_like(tensor)
        _spoil(tensor)
        return LateMessage(receive(self, buffer), tensor, buffer)

    with contextlib.ExitStack() as stack:
        for name in _STARTED:
            stack.enter_context(of(name))
        stack.enter_context(mock.patch.object(shared_attention, "start_transfer", start_transfer))
        stack.enter_context(mock.patch.object(Link, "send", send_late))
        stack.enter_context(mock.patch.object(Link, "receive", receive_late))
        yield started


@torch.no_grad()
def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
