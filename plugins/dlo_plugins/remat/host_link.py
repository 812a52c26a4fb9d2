"""Copies of activations between the device and the host: on two streams of an accelerator, or simulated on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlo_framework.copy_streams import copy_streams, empty_host_tensor
from dlo_framework.errors import DloError
from dlo_framework.units import parse_bytes
from dlo_plugins.remat.allocation_log import host_memory
from dlo_plugins.remat.schedule import Link

_MEASURED_BYTES, _MEASURED_COPIES = 2**26, 4


class HostCopy:
    """Copy that has been started.

    Args:
        target: Tensor that is written.
        source: Tensor that is read; it lives until the copy has been waited for.
        wait: Function that makes the device wait for the copy.
        running: Copies of the link that have not been waited for.
    """

    def __init__(self, target: Tensor, source: Tensor, wait: Callable[[], None], running: set[HostCopy]) -> None:
        self._target, self._wait, self._running = target, wait, running
        self._source: Tensor | None = source
        running.add(self)

    def finish(self) -> Tensor:
        """Makes the device wait for the copy; returns the written tensor."""
        if self._source is not None:
            self._wait()
            self._running.discard(self)
            self._source = None
        return self._target


class HostLink:
    """Link between a device and the host; copies of one direction run one after another, beside computation."""

    def __init__(self) -> None:
        self._running: set[HostCopy] = set()

    def store(self, source: Tensor) -> HostCopy:
        """Starts a copy to the host, which runs after all work that the device has so far."""
        with host_memory():
            target = empty_host_tensor(source, source.device)
        return HostCopy(target, source, self._start(target, source, to_host=True), self._running)

    def load(self, source: Tensor, device: torch.device) -> HostCopy:
        """Allocates memory of the device, and starts a copy from the host into it."""
        target = torch.empty_like(source, device=device)
        return HostCopy(target, source, self._start(target, source, to_host=False), self._running)

    def finish_all(self) -> None:
        """Finishes the copies that a step has left, such as one that an error has ended."""
        for copy in list(self._running):
            copy.finish()

    def _start(self, target: Tensor, source: Tensor, to_host: bool) -> Callable[[], None]:
        """Starts a copy; returns the function that makes the device wait for it."""
        raise NotImplementedError


class StreamLink(HostLink):
    """Link of an accelerator: a stream for each direction, and page-locked memory; the host waits for no copy.

    A tensor's memory returns to the stream of computation after that stream has waited for the copy. The allocator
    therefore need not know the copies' streams, and the memory can be used again at once.

    Args:
        device: Accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._streams = copy_streams(device)

    def _start(self, target: Tensor, source: Tensor, to_host: bool) -> Callable[[], None]:
        stream = self._streams.down if to_host else self._streams.up
        return stream.copy(target, source, records=False).wait


class SimulatedLink(HostLink):
    """Link on a CPU, where device and host share their memory: a copy has arrived after its bytes divided by the rate.

    The bytes are copied when the copy is waited for, so that what is used before that has wrong values.

    Args:
        link: Rates.
        clock: Clock with `perf_counter` and `sleep`; by default waiting takes real time.
    """

    def __init__(self, link: Link, clock: Any = time) -> None:
        super().__init__()
        self.link, self.clock = link, clock
        self._free = {True: 0.0, False: 0.0}  # Seconds at which each direction has run all copies so far.

    def _start(self, target: Tensor, source: Tensor, to_host: bool) -> Callable[[], None]:
        rate = self.link.to_host if to_host else self.link.to_device
        end = self._free[to_host] = max(self.clock.perf_counter(), self._free[to_host]) + source.nbytes / rate

        def wait() -> None:
            target.copy_(source)
            self.clock.sleep(max(0.0, end - self.clock.perf_counter()))

        return wait


def parse_link(text: str) -> Link | None:
    """Returns the link of a config: ``12GB/s`` in both directions, or None for ``auto``.

    Raises:
        DloError: It is neither.
    """
    if str(text).strip() == "auto":
        return None
    try:
        rate = parse_bytes(str(text).strip().removesuffix("/s"), "link")
    except DloError as error:
        raise DloError(f"link must be a rate such as 25GB/s, or auto, got {text}; set one of these") from error
    return Link(rate, rate)


def measure_link(device: torch.device) -> Link:
    """Returns the rates of page-locked copies, both directions at the same time, by an accelerator's events."""
    module, link = torch.get_device_module(device), StreamLink(device)
    there = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=device)
    here = empty_host_tensor(there, device)
    seconds = []
    for _ in range(_MEASURED_COPIES):
        begin, ends = module.Event(enable_timing=True), [module.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        copies = link.store(there), link.load(here, device)
        for copy, end in zip(copies, ends, strict=True):
            copy.finish()
            end.record()
        module.synchronize(device)
        seconds.append([begin.elapsed_time(end) / 1e3 for end in ends])
    # The first copy allocates. The later of two that run at once is waited for last, so its time is the upper bound.
    best = [min(run[direction] for run in seconds[1:]) for direction in (0, 1)]
    return Link(*(_MEASURED_BYTES / max(each, 1e-9) for each in best))
