"""Reads a trace that torch's profiler has exported (Chrome's trace format): what ran on the host and on the device.

Times are seconds since the first event. The categories and arguments are those that Kineto writes (torch 2.11 to 2.14):
`cpu_op`, `user_annotation`, `cuda_runtime`, `kernel`, `gpu_memcpy`, `gpu_memset` and `cpu_instant_event`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError

#: Beginning of the annotations that separate steps and phases.
MARK = "dlo.mark: "
#: Beginning of the annotations of modules' forwards.
MODULE = "module: "
#: Annotations that last as long as a collective is in flight, on whatever thread.
_IN_FLIGHT = re.compile(r"^(gloo|nccl|mpi|ucc):")
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "hip_runtime")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(slots=True)
class HostSpan:
    """Operator, annotation or call of the device's runtime on a thread of the host.

    Attributes:
        name: Name of the operator or annotation.
        start: Start in seconds.
        end: End in seconds.
        category: Category in the trace.
        args: Arguments: shapes, types, sequence number.
    """

    name: str
    start: float
    end: float
    category: str
    args: Mapping[str, Any]


@dataclass(slots=True)
class DeviceSpan:
    """Kernel or copy on the accelerator.

    Attributes:
        name: Name of the kernel.
        start: Start in seconds.
        end: End in seconds.
        category: Category in the trace.
        operator: External id of the operator that launched it; None if unknown.
    """

    name: str
    start: float
    end: float
    category: str
    operator: int | None

    @property
    def is_collective(self) -> bool:
        """Whether it communicates with other ranks."""
        return "nccl" in self.name.lower() or "rccl" in self.name.lower()


@dataclass(slots=True)
class Allocation:
    """Allocation or release of memory.

    Attributes:
        time: Time in seconds.
        bytes: Bytes; negative for a release.
        address: Address of the block.
        on_device: Whether it is the accelerator's memory.
        thread: Thread that asked for it.
    """

    time: float
    bytes: int
    address: int
    on_device: bool
    thread: Any


@dataclass
class Trace:
    """Content of a trace.

    Attributes:
        threads: Spans of each thread of the host, by start; an outer span comes before the inner ones.
        main: Thread that trains: that of the marks.
        marks: Time and label of each mark.
        in_flight: Spans of collectives in flight, as the host's annotations have them.
        device: Spans of the accelerator, by start.
        allocations: Allocations and releases, in order.
    """

    threads: dict[Any, list[HostSpan]] = field(default_factory=dict)
    main: Any = None
    marks: list[tuple[float, str]] = field(default_factory=list)
    in_flight: list[HostSpan] = field(default_factory=list)
    device: list[DeviceSpan] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a trace file, which may be compressed.

    Raises:
        DloError: The file is not a trace.
    """
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = content["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DloError(
            f"profile: the trace must be a file that torch's profiler has exported, got {path}: {error}; profile again"
        ) from error
    assert isinstance(events, list)
    return events


def parse_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Returns the content of a trace's events."""
    complete = [event for event in events if "ts" in event and event.get("ph") in ("X", "i")]
    origin = min((float(event["ts"]) for event in complete), default=0.0)
    trace = Trace()
    operators = _launches(complete)
    for event in complete:
        _add(trace, event, (float(event["ts"]) - origin) * 1e-6, operators)
    for spans in trace.threads.values():
        spans.sort(key=lambda span: (span.start, -span.end))
    trace.device.sort(key=lambda span: span.start)
    trace.allocations.sort(key=lambda allocation: allocation.time)
    trace.marks.sort()
    trace.in_flight.sort(key=lambda span: span.start)
    return trace


def _launches(events: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """Returns the external id of the operator of each launch, by correlation, for kernels without one."""
    launches = (event.get("args") or {} for event in events if event.get("cat") in _HOST)
    return {
        args["correlation"]: args["External id"] for args in launches if {"correlation", "External id"} <= args.keys()
    }


def _add(trace: Trace, event: Mapping[str, Any], start: float, operators: Mapping[int, int]) -> None:
    """Adds one event."""
    category, name, args = event.get("cat", ""), str(event.get("name", "")), event.get("args") or {}
    end, thread = start + float(event.get("dur", 0.0)) * 1e-6, event.get("tid")
    if category == "cpu_instant_event" and name == "[memory]":
        trace.allocations.append(
            Allocation(start, int(args["Bytes"]), int(args["Addr"]), int(args["Device Type"]) != 0, thread)
        )
    elif category in _DEVICE:
        operator = args.get("External id", operators.get(args.get("correlation", -1)))
        trace.device.append(DeviceSpan(name, start, end, category, operator))
    elif category in _HOST:
        if name.startswith(MARK):
            trace.marks.append((end, name.removeprefix(MARK)))
            trace.main = thread
        elif _IN_FLIGHT.match(name):
            trace.in_flight.append(HostSpan(name, start, end, category, args))
        else:
            trace.threads.setdefault(thread, []).append(HostSpan(name, start, end, category, args))
