"""Roofline: what kinds of work and modules reach, beside what the machine's arithmetic and memory allow.

Roofline: An Insightful Visual Performance Model for Floating-Point Programs and Multicore Architectures. Williams,
Waterman, Patterson, 2009, https://doi.org/10.1145/1498765.1498785. Bytes are those that each operator reads and writes
at least once; those that a cache serves count too, so that small tensors may exceed the memory's roof.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dlo_plugins.planner.machine import load_machine

_CALLS = 9


@dataclass(frozen=True)
class MachinePeaks:
    """Peaks of one rank's device.

    Attributes:
        flops: Floating-point operations a second of matrix products, by dtype.
        bandwidth: Bytes a second between memory and chip.
        source: Origin of the figures.
    """

    flops: Mapping[str, float]
    bandwidth: float
    source: str

    def rate(self, dtype: str) -> float | None:
        """Returns the peak of a dtype; None if it is not known."""
        return self.flops.get(dtype)


def read_peaks(machine: str) -> MachinePeaks:
    """Returns the peaks of a machine of `dlo plan`, by name or file.

    Raises:
        DloError: The machine is unknown, or its file is invalid.
    """
    found = load_machine(machine)
    return MachinePeaks(dict(found.peak), found.bandwidth, f"machine {found.name}")


def measure_peaks(device: torch.device, dtypes: Sequence[str]) -> MachinePeaks:
    """Returns the measured peaks of a device, with the process's threads; it takes tenths of a second.

    Args:
        device: Device.
        dtypes: Names of the dtypes of products.
    """
    size = 512 if device.type == "cpu" else 8192
    flops = {}
    for name in dtypes:
        left = torch.randn(size, size, device=device).to(getattr(torch, name))
        right = torch.randn(size, size, device=device).to(getattr(torch, name))
        flops[name] = 2.0 * size**3 / _seconds(lambda a=left, b=right: torch.mm(a, b), device)  # type: ignore[misc]
    source = torch.zeros(1 << (24 if device.type == "cpu" else 28), device=device)
    target = torch.zeros_like(source)
    bandwidth = 2.0 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    return MachinePeaks(flops, bandwidth, f"measured: products of {size} x {size}, a copy of {source.nbytes >> 20} MiB")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the shortest time of a function: a peak is what the device can do undisturbed."""
    found = []
    for _ in range(_CALLS + 1):
        began = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)


@dataclass(frozen=True)
class RooflinePoint:
    """Work of a kind or a module beside the machine's roof.

    Attributes:
        name: Name of the kind or module.
        seconds: Time of a step.
        flops: FLOPs of a step.
        bytes: Bytes of a step.
        flops_rate: FLOPs a second that it reaches.
        bytes_rate: Bytes a second that it reaches.
        bound: Roof that limits it: `compute` or `memory`; empty without a known peak.
        fraction: Fraction of the roof that it reaches; None without a known peak.
    """

    name: str
    seconds: float
    flops: float
    bytes: float
    flops_rate: float
    bytes_rate: float
    bound: str
    fraction: float | None


def roofline_point(
    name: str, seconds: float, flops: float, moved: float, dtype: str, peaks: MachinePeaks | None
) -> RooflinePoint:
    """Returns the point of a kind or a module.

    Args:
        name: Name of the kind or module.
        seconds: Time of a step.
        flops: FLOPs of a step.
        moved: Bytes of a step.
        dtype: Dtype of its products.
        peaks: Peaks of the machine; None if unknown.
    """
    rates = (flops / seconds, moved / seconds) if seconds else (0.0, 0.0)
    if peaks is None or not (flops or moved):
        return RooflinePoint(name, seconds, flops, moved, *rates, "", None)
    peak = peaks.rate(dtype) if flops else None
    by_compute = flops / peak if peak else 0.0
    by_memory = moved / peaks.bandwidth
    if flops and not peak:
        return RooflinePoint(name, seconds, flops, moved, *rates, "", None)
    bound, least = ("compute", by_compute) if by_compute >= by_memory else ("memory", by_memory)
    return RooflinePoint(name, seconds, flops, moved, *rates, bound, least / seconds if seconds else None)
