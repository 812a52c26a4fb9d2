"""Timeline of the memory of profiled steps, and what is in memory at its peak, by module and phase.

Counted from what is allocated when the window begins: parameters and the optimizer's state are below that line.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlo_plugins.profiling.step_breakdown import OUTSIDE, HostFrames, Phases
from dlo_plugins.profiling.trace_file import Trace


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
    found = MemoryTimeline(on_device=on_device)
    first, last = phases.steps[0][1][0].start, phases.steps[-1][1][-1].end
    live: dict[int, tuple[int, str, str]] = {}
    total, best = 0, dict(live)
    for each in trace.allocations:
        if each.on_device != on_device or not first <= each.time <= last:
            continue
        total += each.bytes
        found.points.append((each.time, total))
        if each.bytes < 0:
            live.pop(each.address, None)
            continue
        phase = phases.at(each.time)
        frame = frames.at(each.thread, each.time)
        live[each.address] = (each.bytes, (frame.module if frame else "") or OUTSIDE[phase], phase)
        if total > found.peak:
            found.peak, found.time, found.phase, best = total, each.time, phase, dict(live)
    for size, module, phase in best.values():
        found.at_peak[module] = found.at_peak.get(module, 0) + size
        found.by_phase[phase] = found.by_phase.get(phase, 0) + size
    return found
