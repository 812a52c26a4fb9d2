"""Profile of the steps of one rank: its trace, read and divided, its memory and roofline; and which rank is slow.

Memory is counted from what is allocated when the window begins: parameters and the optimizer's state are below that.

Roofline: An Insightful Visual Performance Model for Floating-Point Programs and Multicore Architectures. Williams,
Waterman, Patterson, 2009, https://doi.org/10.1145/1498765.1498785. Bytes are those that each operator reads and writes
at least once; those that a cache serves count too, so that small tensors may exceed the memory's roof.

Ranks of a synchronous step wait for the slowest one inside their collectives. So the time that a rank does not wait is
its own, and the rank with the most of its own time holds the others up. What even the last rank to arrive waits is the
transfer itself, which no rank can avoid: the links.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.measurement import measure_rank
from dlo_plugins.profile.device_waits import DeviceWait
from dlo_plugins.profile.operations import KINDS
from dlo_plugins.profile.step_breakdown import (
    OUTSIDE,
    Breakdown,
    HostFrames,
    ModuleTime,
    Phases,
    StepTime,
    Trace,
    break_down,
    parse_trace,
)


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


def read_peaks(machine: str) -> MachinePeaks:
    """Returns the peaks of a machine of `dlo plan`, by name or file.

    Raises:
        DloError: The machine is unknown, or its file is invalid.
    """
    spec = load_machine(machine)
    return MachinePeaks(dict(spec.peak), spec.bandwidth, f"machine {spec.name}")


def measure_peaks(device: torch.device, dtypes: Sequence[str]) -> MachinePeaks:
    """Returns the measured peaks of a device, with the process's threads, as `dlo plan --measure` takes them.

    Args:
        device: Device.
        dtypes: Names of the dtypes of products.
    """
    by_dtype = {name: measure_rank(0, 1, device.type, name) for name in dtypes}
    flops = {name: one.peak for name, one in by_dtype.items()}
    bandwidth = max(one.bandwidth for one in by_dtype.values())
    return MachinePeaks(flops, bandwidth, "measured: the fastest of two products, a copy of a large tensor")


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
    peak = peaks.flops.get(dtype) if peaks is not None and flops else None
    if peaks is None or not (flops or moved) or (flops and not peak):
        return RooflinePoint(name, seconds, flops, moved, *rates, "", None)
    by_compute, by_memory = flops / peak if peak else 0.0, moved / peaks.bandwidth
    bound = "compute" if by_compute >= by_memory else "memory"
    fraction = max(by_compute, by_memory) / seconds if seconds else None
    return RooflinePoint(name, seconds, flops, moved, *rates, bound, fraction)


@dataclass
class MemoryTimeline:
    """Memory over the profiled steps.

    Attributes:
        points: Seconds, and bytes beyond the start's.
        peak: Most bytes beyond the start's.
        time: Time of the peak in seconds.
        phase: Phase of the step at the peak.
        at_peak: Bytes at the peak by the module that has allocated them.
        by_phase: Bytes at the peak by the phase in which they were allocated.
        on_device: Whether it is the accelerator's memory.
    """

    points: list[tuple[float, int]] = field(default_factory=list)
    peak: int = 0
    time: float = 0.0
    phase: str = ""
    at_peak: dict[str, int] = field(default_factory=dict)
    by_phase: dict[str, int] = field(default_factory=dict)
    on_device: bool = False


def memory_timeline(trace: Trace, phases: Phases, frames: HostFrames) -> MemoryTimeline | None:
    """Returns the memory timeline of a trace; None if its memory was not recorded."""
    if not trace.allocations or not phases.steps:
        return None
    on_device = any(each.on_device for each in trace.allocations)
    timeline = MemoryTimeline(on_device=on_device)
    first, last = phases.steps[0][1][0].start, phases.steps[-1][1][-1].end
    live: dict[int, tuple[int, str, str]] = {}
    total, best = 0, dict(live)
    for each in trace.allocations:
        if each.on_device != on_device or not first <= each.time <= last:
            continue
        total += each.bytes
        timeline.points.append((each.time, total))
        if each.bytes < 0:
            live.pop(each.address, None)
            continue
        phase = phases.at(each.time)
        frame = frames.at(each.thread, each.time)
        live[each.address] = (each.bytes, (frame.module if frame else "") or OUTSIDE[phase], phase)
        if total > timeline.peak:
            timeline.peak, timeline.time, timeline.phase, best = total, each.time, phase, dict(live)
    for size, module, phase in best.values():
        timeline.at_peak[module] = timeline.at_peak.get(module, 0) + size
        timeline.by_phase[phase] = timeline.by_phase.get(phase, 0) + size
    return timeline


#: Points of a memory timeline that are kept.
_POINTS = 2000
#: Thread number, in a trace, of the backward's ranges by module.
_BACKWARD_THREAD = 999_999


@dataclass
class RankProfile:
    """Profile of the steps of one rank.

    Attributes:
        rank: Global rank.
        host: Name of its machine.
        device: Name of its device.
        breakdown: Division of the time.
        memory: Memory over the steps; None if it was not recorded.
        walls: Seconds of each step by the host's own clock.
        waits: Lines that wait for the device; None if they were not looked for.
        synchronisations: Seconds of a step in calls of the device's runtime that wait for it, by call and module.
        state: Bytes of parameters, gradients and optimizer state, by name.
        trace: Path of the trace; None if it was not kept.
        note: Reason for what is missing.
    """

    rank: int
    host: str
    device: str
    breakdown: Breakdown
    memory: MemoryTimeline | None
    walls: list[float]
    waits: list[DeviceWait] | None = None
    synchronisations: dict[str, tuple[int, float]] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    trace: str | None = None
    note: str = ""

    @property
    def measured(self) -> float:
        """Mean seconds of a step by the host's own clock."""
        return sum(self.walls) / len(self.walls) if self.walls else 0.0

    @property
    def explained(self) -> float:
        """Sum of all kinds, over the step by the host's own clock."""
        total = sum(self.breakdown.kind(kind) for kind in KINDS)
        return total / self.measured if self.measured else 0.0

    def kind_points(self, peaks: MachinePeaks | None) -> dict[str, RooflinePoint]:
        """Returns the roofline of each kind.

        Args:
            peaks: Peaks of the machine; None if unknown.
        """
        count = len(self.breakdown.steps) or 1
        return {
            kind: roofline_point(
                kind, self.breakdown.kind(kind), work.flops / count, work.bytes / count, work.dtype, peaks
            )
            for kind, work in self.breakdown.work.items()
        }

    def module_points(self, peaks: MachinePeaks | None, depth: int = 4) -> dict[str, RooflinePoint]:
        """Returns the roofline of each group of modules.

        Args:
            peaks: Peaks of the machine; None if unknown.
            depth: Number of components of a group's name.
        """
        count = len(self.breakdown.steps) or 1
        return {
            name: roofline_point(name, own.seconds / count, own.flops / count, own.bytes / count, own.dtype, peaks)
            for name, own in group_modules(self.breakdown.modules, depth).items()
        }


def group_name(module: str, depth: int = 4) -> str:
    """Returns the group of a module: blocks by number are one group, and deep modules belong to the one around them.

    Args:
        module: Name of the module.
        depth: Number of components of a group's name.
    """
    words = ["*" if word.isdigit() else word for word in module.split(".")]
    return module if module.startswith("(") else ".".join(words[:depth])


def group_modules(modules: dict[str, ModuleTime], depth: int = 4) -> dict[str, ModuleTime]:
    """Returns the time of each group of modules, the longest first.

    Args:
        modules: Times by module.
        depth: Number of components of a group's name.
    """
    groups: dict[str, ModuleTime] = {}
    for name, own in modules.items():
        group = groups.setdefault(group_name(name, depth), ModuleTime())
        group.forward += own.forward
        group.backward += own.backward
        group.include(own)
        for kind, seconds in own.kinds.items():
            group.kinds[kind] = group.kinds.get(kind, 0.0) + seconds
    return dict(sorted(groups.items(), key=lambda item: -item[1].seconds))


def analyse(events: list[dict[str, Any]], rank: int, host: str, device: str, walls: list[float]) -> RankProfile:
    """Returns the profile of a trace's steps, and adds the backward's ranges by module to the events.

    Args:
        events: Events of the trace.
        rank: Global rank.
        host: Name of the machine.
        device: Name of the device.
        walls: Seconds of each step by the host's own clock.
    """
    trace = parse_trace(events)
    phases = Phases(trace)
    frames = HostFrames(trace, phases)
    profile = RankProfile(rank, host, device, break_down(trace, phases, frames), None, walls)
    memory = memory_timeline(trace, phases, frames)
    if memory is not None:
        memory.points = _thin(memory.points, memory.time)
        profile.memory = memory
    profile.synchronisations = _synchronisations(trace, frames, max(1, len(profile.breakdown.steps)))
    events += _backward_events(trace, frames, events)
    return profile


def _thin(points: list[tuple[float, int]], peak: float) -> list[tuple[float, int]]:
    """Returns at most a number of points, the peak among them."""
    every = -(-len(points) // _POINTS) if points else 1
    return [point for number, point in enumerate(points) if number % every == 0 or point[0] == peak]


_WAITING = re.compile(r"^(cuda|hip)(Device|Stream|Event)Synchronize|^(cuda|hip)Memcpy(?!.*Async)")


def _synchronisations(trace: Trace, frames: HostFrames, steps: int) -> dict[str, tuple[int, float]]:
    """Returns calls and seconds of a step in the runtime's waits, by call and by the module or phase that made it."""
    waits: dict[str, tuple[int, float]] = {}
    for thread, spans in trace.threads.items():
        for span in spans:
            if not _WAITING.match(span.name):
                continue
            frame = frames.at(thread, span.start)
            name = f"{span.name} in {frame.module if frame is not None and frame.module else 'the step'}"
            count, seconds = waits.get(name, (0, 0.0))
            waits[name] = count + 1, seconds + (span.end - span.start) / steps
    return dict(sorted(waits.items(), key=lambda item: -item[1][1]))


def _backward_events(trace: Trace, frames: HostFrames, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns ranges of the modules' backwards, for a thread of their own in the trace."""
    origin = min(
        (float(event["ts"]) for event in events if "ts" in event and event.get("ph") in ("X", "i")), default=0.0
    )
    process = next((event["pid"] for event in events if event.get("cat") == "cpu_op"), 0)
    ranges: list[dict[str, Any]] = []
    for segments in frames.segments.values():
        last: dict[str, Any] | None = None
        for start, end, frame in segments:
            module = frame.module if frame is not None and frame.backward else ""
            begin = origin + start * 1e6
            if last is not None and module == last["name"] and begin - last["ts"] - last["dur"] < 1:
                last["dur"] += (end - start) * 1e6
                continue
            last = None
            if module:
                last = {"ph": "X", "cat": "module_backward", "name": module, "pid": process, "tid": _BACKWARD_THREAD,
                        "ts": begin, "dur": (end - start) * 1e6}  # fmt: skip
                ranges.append(last)
    if ranges:
        ranges.append({"ph": "M", "name": "thread_name", "pid": process, "tid": _BACKWARD_THREAD, "ts": 0,
                      "args": {"name": "backward, by module"}})  # fmt: skip
    return ranges


def rewrite_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """Writes events into a compressed trace, in place of its own.

    Args:
        path: Path of the trace.
        events: All events.
    """
    content = json.loads(gzip.decompress(path.read_bytes()))
    content["traceEvents"] = events
    path.write_bytes(gzip.compress(json.dumps(content).encode(), 3))


#: Fraction of a step by which a rank's own time must exceed the others' median, to be called slow.
SLOW = 0.1
#: Fraction of the steps in which a slow rank must have the most time of its own.
LEADS = 2 / 3
#: Fraction of a step that every rank waits, from which the links are named.
LINKS = 0.25
_CAUSES = ("compute", "data", "host")


@dataclass(frozen=True)
class RankSummary:
    """Median times of a rank's steps, as :class:`~dlo_plugins.profile.step_breakdown.StepTime` has them.

    Attributes:
        rank: Global rank.
        wall: Time of a step.
        compute: Time in operators.
        wait: Time in which it waited for collectives.
        data: Time in which it waited for the data loader.
        host: Other time.
    """

    rank: int
    wall: float
    compute: float
    wait: float
    data: float
    host: float

    @property
    def own(self) -> float:
        """Time that the rank needed by itself."""
        return self.wall - self.wait


@dataclass(frozen=True)
class StragglerReport:
    """Times of the ranks, and what holds them up.

    Attributes:
        ranks: Median times of each rank.
        slowest: Rank that the others wait for; None if they are alike.
        cause: Reason: `compute`, `data`, `host`; `links` where all wait; empty if nothing stands out.
        excess: Seconds by which the slowest rank's own time exceeds the others' median.
        by_cause: Seconds of the excess by cause.
        transfer: Seconds of a step that even the rank with the shortest wait waits for collectives.
        steps: Number of steps in which the slowest rank had the most time of its own, of all steps.
        text: Conclusion in words.
    """

    ranks: list[RankSummary]
    slowest: int | None
    cause: str
    excess: float
    by_cause: dict[str, float]
    transfer: float
    steps: tuple[int, int]
    text: str

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        return asdict(self)


def find_straggler(ranks: Mapping[int, Sequence[StepTime]]) -> StragglerReport:
    """Returns which rank is slow, and why.

    Args:
        ranks: Steps of each rank; all have the same steps.
    """
    summaries = [_median(rank, steps) for rank, steps in sorted(ranks.items()) if steps]
    if len(summaries) < 2:
        return StragglerReport(summaries, None, "", 0.0, {}, 0.0, (0, 0), "one rank was profiled: nothing to compare")
    wall = statistics.median(rank.wall for rank in summaries)
    transfer = min(rank.wait for rank in summaries)
    slowest = max(summaries, key=lambda rank: rank.own)
    others = [rank for rank in summaries if rank is not slowest]
    by_cause = {
        cause: getattr(slowest, cause) - statistics.median(getattr(rank, cause) for rank in others) for cause in _CAUSES
    }
    excess = slowest.own - statistics.median(rank.own for rank in others)
    count = min(len(ranks[rank.rank]) for rank in summaries)
    leads = sum(
        max((ranks[each.rank][step].own, each.rank) for each in summaries)[1] == slowest.rank for step in range(count)
    )
    straggler: int | None = slowest.rank
    if excess > SLOW * wall and leads >= LEADS * count:
        cause = max(by_cause, key=lambda name: by_cause[name])
        text = (
            f"rank {slowest.rank} is slow, by {_ms(excess)} of a step of {_ms(wall)}: {_WORDS[cause]}"
            f" ({_ms(getattr(slowest, cause))}, the others' median is {_ms(getattr(slowest, cause) - by_cause[cause])})"
        )
    elif transfer > LINKS * wall:
        straggler, cause = None, "links"
        text = (
            f"the links: every rank waits at least {_ms(transfer)} of a step of {_ms(wall)} for collectives, and none"
            f" arrives late"
        )
    else:
        straggler, cause = None, ""
        text = f"no rank stands out: their own times differ by {_ms(excess)} of a step of {_ms(wall)}"
    everyone = min(rank.data for rank in summaries)
    if cause != "data" and everyone > SLOW * wall:
        text += f"; every rank waits at least {_ms(everyone)} for its data loader"
    return StragglerReport(summaries, straggler, cause, excess, by_cause, transfer, (leads, count), text)


_WORDS = {
    "compute": "it computes longer",
    "data": "it waits for its data loader",
    "host": "its host is busy between operators: Python, launches, or waits outside torch",
}


def _median(rank: int, steps: Sequence[StepTime]) -> RankSummary:
    names = ("wall", "compute", "wait", "data", "host")
    return RankSummary(rank, *(statistics.median(getattr(step, name) for step in steps) for name in names))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
