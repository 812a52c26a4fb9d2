"""Divides the time of profiled steps among kinds of work and modules, so that the parts add up to the steps.

On a CPU, each moment of the training thread belongs to the innermost operator that runs. A moment without an operator
is a wait for a collective if one is in flight and ends before the next operator begins, and otherwise the host's. On an
accelerator, each moment belongs to the kernel that runs; then to a collective or a copy; the device's idle moments are
the host's, or the data loader's while it fetches.

A backward's operators belong to the module of the forward operator with the same sequence number, which autograd gives
both; so no hook is needed in backward.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlo_plugins.profiling.operation_costs import Work, is_costed_as_one, operator_cost
from dlo_plugins.profiling.operation_kinds import (
    ATTENTION,
    COPIES,
    DATA,
    EXPOSED,
    HOST,
    NORMALISATION,
    OPTIMIZER,
    kind_of_kernel,
    kind_of_operator,
)
from dlo_plugins.profiling.trace_file import MODULE, HostSpan, Trace

_NODE = "autograd::engine::evaluate_function: "
_LOADER = "enumerate(DataLoader)"
_STEP_OF_OPTIMIZER = "Optimizer.step#"
_LONGEST_OVERSHOOT = 5e-6  # Seconds by which a wait's end may be recorded after the collective's.
#: Names for the time outside modules, by phase.
OUTSIDE = {
    "data": "(data loader)", "forward": "(loss and step)", "backward": "(loss and step)", "optimizer": "(optimizer)",
    "between": "(callbacks and loop)",
}  # fmt: skip


@dataclass(slots=True)
class Frame:
    """Operator or annotation of the host, with what it belongs to.

    Attributes:
        span: Operator or annotation.
        kind: Kind of work; None if it has none of its own.
        module: Name of the module that runs.
        backward: Whether it belongs to a backward.
        cost: Work of the operator, without that of inner ones; None if unknown.
        covered: Whether its work, or an inner or outer operator's, has been counted.
    """

    span: HostSpan
    kind: str | None
    module: str
    backward: bool
    cost: Work | None = None
    covered: bool = False


@dataclass
class ModuleTime(Work):
    """Time and work of a module, without its submodules.

    Attributes:
        forward: Seconds in forward.
        backward: Seconds in backward.
        kinds: Seconds by kind.
    """

    forward: float = 0.0
    backward: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds in forward and backward."""
        return self.forward + self.backward

    def add(self, kind: str, seconds: float, backward: bool) -> None:
        """Adds time."""
        self.kinds[kind] = self.kinds.get(kind, 0.0) + seconds
        if backward:
            self.backward += seconds
        else:
            self.forward += seconds


@dataclass
class StepTime:
    """Time of one step, in seconds.

    Attributes:
        number: Number of the optimizer step.
        wall: Time between the step's marks, without pauses.
        kinds: Time by kind; they add up to the wall time.
        hidden: Time of collectives in flight while the rank worked.
    """

    number: int
    wall: float
    kinds: dict[str, float]
    hidden: float


@dataclass
class Breakdown:
    """Where the time of the profiled steps went.

    Attributes:
        steps: Times of each step.
        modules: Time and work by module, over all steps; time outside modules is under a name in brackets.
        work: FLOPs and bytes by kind, over all steps.
        on_device: Whether the times are an accelerator's.
    """

    steps: list[StepTime]
    modules: dict[str, ModuleTime]
    work: dict[str, Work]
    on_device: bool

    @property
    def wall(self) -> float:
        """Mean time of a step."""
        return sum(step.wall for step in self.steps) / len(self.steps) if self.steps else 0.0

    def kind(self, name: str) -> float:
        """Returns the mean time of a kind in a step."""
        return sum(step.kinds.get(name, 0.0) for step in self.steps) / len(self.steps) if self.steps else 0.0

    @property
    def hidden(self) -> float:
        """Mean time of hidden collectives in a step."""
        return sum(step.hidden for step in self.steps) / len(self.steps) if self.steps else 0.0


@dataclass(frozen=True)
class Interval:
    """Interval of time.

    Attributes:
        start: Start in seconds.
        end: End in seconds.
    """

    start: float
    end: float


#: Piece of a thread's time: start, end, and the innermost frame.
Segment = tuple[float, float, Frame | None]


class Phases:
    """Phase of a step at each time, and the steps themselves, from the marks.

    Args:
        trace: Trace of the steps.

    Attributes:
        steps: Number and intervals of each step, without pauses.
    """

    def __init__(self, trace: Trace) -> None:
        changes: list[tuple[float, str]] = []
        self.steps: list[tuple[int, list[Interval]]] = []
        number, begun, paused = 0, None, False
        pieces: list[Interval] = []
        for time, label in trace.marks:
            word, _, rest = label.partition(" ")
            if word == "step":
                number, begun, pieces = int(rest), time, []
                changes.append((time, "between"))
            elif word == "end" and begun is not None:
                self.steps.append((number, [*pieces, Interval(begun, time)]))
                begun, pieces = None, []
            elif word == "pause" and begun is not None and not paused:
                pieces.append(Interval(begun, time))
                paused = True
            elif word == "resume" and paused:
                begun, paused = time, False
            elif word in OUTSIDE:
                changes.append((time, word))
        changes += self._loaders(trace) + self._optimizer_ends(trace, changes)
        changes.sort(key=lambda change: change[0])
        self._times = [time for time, _ in changes]
        self._names = [name for _, name in changes]

    @staticmethod
    def _loaders(trace: Trace) -> list[tuple[float, str]]:
        """Returns the changes at the calls of torch's data loaders, if no marks surround the fetches."""
        if any(label == "data" for _, label in trace.marks):
            return []
        spans = [s for s in trace.threads.get(trace.main, []) if s.name.startswith(_LOADER)]
        return [change for span in spans for change in ((span.start, "data"), (span.end, "between"))]

    @staticmethod
    def _optimizer_ends(trace: Trace, changes: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
        """Returns the changes at the ends of the optimizers' steps."""
        ends = sorted(s.end for s in trace.threads.get(trace.main, []) if s.name.startswith(_STEP_OF_OPTIMIZER))
        times = sorted(time for time, _ in changes)
        found = []
        for time in (time for time, name in changes if name == "optimizer"):
            after = times[bisect.bisect_right(times, time) :]
            limit = after[0] if after else float("inf")
            inside = [end for end in ends if time < end <= limit]
            if inside:
                found.append((inside[-1], "between"))
        return found

    def at(self, time: float) -> str:
        """Returns the phase at a time."""
        place = bisect.bisect_right(self._times, time) - 1
        return self._names[place] if place >= 0 else "between"

    def split(self, start: float, end: float) -> Iterator[tuple[float, float, str]]:
        """Yields the pieces of an interval, each with its phase."""
        place = bisect.bisect_right(self._times, start)
        while start < end:
            until = min(end, self._times[place]) if place < len(self._times) else end
            yield start, until, self._names[place - 1] if place else "between"
            start, place = until, place + 1


def break_down(trace: Trace, phases: Phases, frames: HostFrames) -> Breakdown:
    """Returns where the time of a trace's steps went.

    Args:
        trace: Trace.
        phases: Phases of the trace.
        frames: Operators of the trace.
    """
    on_device = bool(trace.device)
    found = Breakdown([], {}, {}, on_device)
    if on_device:
        _divide_device(trace, phases, frames, found)
    else:
        _divide_host(trace, phases, frames, found)
    inside = [interval for _, intervals in phases.steps for interval in intervals]
    for frame in frames.costed:
        if _contains(inside, frame.span.start):
            _add_work(found, frame, phases)
    return found


def _contains(intervals: Sequence[Interval], time: float) -> bool:
    return any(interval.start <= time < interval.end for interval in intervals)


def _add_work(found: Breakdown, frame: Frame, phases: Phases) -> None:
    assert frame.cost is not None
    phase = phases.at(frame.span.start)
    kind = _in_phase(frame.kind or HOST, phase)
    module = found.modules.setdefault(frame.module or OUTSIDE[phase], ModuleTime())
    for of in (found.work.setdefault(kind, Work()), module):
        of.include(frame.cost)


def _in_phase(kind: str, phase: str) -> str:
    """Returns the kind under which a table shows work of a kind in a phase."""
    if phase == "data":
        return DATA
    if phase == "optimizer" and kind != EXPOSED:
        return OPTIMIZER
    return kind


# --- the host's operators --------------------------------------------------------------------------------------


class HostFrames:
    """Operators and annotations of the host's threads, with what they belong to.

    Args:
        trace: Trace.
        phases: Phases of its steps.

    Attributes:
        costed: Frames whose work is known.
        of_operator: Frames by the external id of their operator.
        segments: Pieces of each thread's time: start, end, and the innermost frame, or None.
    """

    def __init__(self, trace: Trace, phases: Phases) -> None:
        self._forwards: dict[int, tuple[str, str | None]] = {}  # module and kind by sequence number
        self.costed: list[Frame] = []
        self.of_operator: dict[int, Frame] = {}
        self.segments: dict[Any, list[Segment]] = {}
        self._starts: dict[Any, list[float]] = {}
        others = [thread for thread in trace.threads if thread != trace.main]
        for thread in ([trace.main] if trace.main in trace.threads else []) + others:
            self.segments[thread] = [each for each in self._walk(trace.threads[thread]) if each[1] > each[0]]
            self._starts[thread] = [each[0] for each in self.segments[thread]]

    def at(self, thread: Any, time: float) -> Frame | None:
        """Returns the innermost frame of a thread at a time; None if it has none."""
        place = bisect.bisect_right(self._starts.get(thread, []), time) - 1
        if place < 0 or time > self.segments[thread][place][1]:
            return None
        return self.segments[thread][place][2]

    def _walk(self, spans: Iterable[HostSpan]) -> Iterator[Segment]:
        """Yields the pieces of a thread's time, and collects its frames."""
        stack: list[Frame] = []
        cursor = -1.0
        last_module = ""
        for span in spans:
            while stack and stack[-1].span.end <= span.start:
                yield max(cursor, stack[-1].span.start), stack[-1].span.end, stack[-1]
                cursor = stack[-1].span.end
                self._leave(stack)
            if cursor >= 0:
                yield cursor, span.start, stack[-1] if stack else None
            cursor = span.start
            if stack and span.end > stack[-1].span.end:
                span.end = stack[-1].span.end
            frame = self._frame(span, stack, last_module)
            if span.name.startswith(_NODE) and frame.module:
                last_module = frame.module
            stack.append(frame)
            if "External id" in span.args and span.category == "cpu_op":
                self.of_operator[span.args["External id"]] = frame
        while stack:
            yield cursor, stack[-1].span.end, stack[-1]
            cursor = max(cursor, stack[-1].span.end)
            self._leave(stack)

    def _frame(self, span: HostSpan, stack: list[Frame], last_module: str) -> Frame:
        outer = stack[-1] if stack else None
        module, backward = (outer.module, outer.backward) if outer is not None else ("", False)
        number = int(span.args.get("Sequence number", -1))
        if span.name.startswith(MODULE):  # Also in a forward that backward repeats.
            return Frame(span, None, span.name.removeprefix(MODULE), backward)
        if span.name.startswith(_NODE):
            known = self._forwards.get(number)
            if known is None:  # Gradients are accumulated right after the node that made them.
                known = (last_module if "AccumulateGrad" in span.name else "", None)
            return Frame(span, known[1] if known[1] in (ATTENTION, NORMALISATION) else None, known[0], True)
        # A node's operators have the kind of its forward, where that is one of a composed operator.
        kind = outer.kind if outer is not None and outer.backward and outer.kind in (ATTENTION, NORMALISATION) else None
        if kind is None and span.category == "cpu_op":
            kind = kind_of_operator(span.name, outer.kind if outer else None, outer.span.name if outer else "", module)
        if kind is None and outer is not None and span.category != "user_annotation":
            kind = outer.kind
        frame = Frame(span, kind, module, backward)
        if span.category == "cpu_op" and number >= 0 and not span.name.startswith(_NODE):
            self._forwards[number] = (module, kind)
        return frame

    def _leave(self, stack: list[Frame]) -> None:
        """Closes the innermost frame, and counts its work if no inner operator has."""
        frame = stack.pop()
        name = frame.span.name
        counts = name.startswith("aten::") and frame.kind not in (None, HOST, EXPOSED)
        counts = counts and not any(is_costed_as_one(outer.span.name) for outer in stack[-4:])
        if counts and not frame.covered and frame.span.category == "cpu_op":
            frame.cost = operator_cost(name, frame.span.args)
            if frame.cost is not None:
                self.costed.append(frame)
                frame.covered = True
        if stack and frame.covered:
            stack[-1].covered = True


# --- a CPU's time ----------------------------------------------------------------------------------------------


def _divide_host(trace: Trace, phases: Phases, frames: HostFrames, found: Breakdown) -> None:
    waits = _Waits(trace)
    own = frames.segments.get(trace.main, [])
    segments = [segment for segment in _with_gaps(own, phases.steps) if segment[1] > segment[0]]
    starts = [segment[0] for segment in segments]
    for number, intervals in phases.steps:
        kinds: dict[str, float] = {}
        for interval in intervals:
            place = max(0, bisect.bisect_right(starts, interval.start) - 1)
            while place < len(segments) and segments[place][0] < interval.end:
                start, end, frame = segments[place]
                start, end = max(start, interval.start), min(end, interval.end)
                if start < end:
                    _divide_segment(start, end, frame, phases, waits, kinds, found.modules)
                place += 1
        wall = sum(interval.end - interval.start for interval in intervals)
        in_flight = sum(_overlap(waits.union, interval) for interval in intervals)
        found.steps.append(StepTime(number, wall, kinds, max(0.0, in_flight - kinds.get(EXPOSED, 0.0))))


def _with_gaps(segments: Sequence[Segment], steps: Sequence[tuple[int, list[Interval]]]) -> list[Segment]:
    """Returns the segments with pieces without a frame before and after them, so that they cover all steps."""
    if not steps:
        return list(segments)
    first, last = steps[0][1][0].start, steps[-1][1][-1].end
    if not segments:
        return [(first, last, None)]
    return [
        (min(first, segments[0][0]), segments[0][0], None),
        *segments,
        (segments[-1][1], max(last, segments[-1][1]), None),
    ]


class _Waits:
    """Collectives in flight on the host's threads.

    Args:
        trace: Trace.

    Attributes:
        union: Times at which any collective is in flight.
    """

    def __init__(self, trace: Trace) -> None:
        self.union = merge(Interval(span.start, span.end) for span in trace.in_flight)
        self._ends = sorted((span.end, span.start) for span in trace.in_flight)
        self._keys = [end for end, _ in self._ends]

    def wait(self, start: float, end: float) -> Interval | None:
        """Returns the wait for collectives in an interval without operators; None if nothing is waited for.

        A host that waits for a collective does nothing until it ends: so one that ends later is not waited for.
        """
        place = bisect.bisect_right(self._keys, start)
        found = [
            Interval(max(start, began), min(ended, end))
            for ended, began in self._ends[place : bisect.bisect_right(self._keys, end + _LONGEST_OVERSHOOT)]
        ]
        if not found:
            return None
        return Interval(min(each.start for each in found), max(each.end for each in found))


def _divide_segment(
    start: float, end: float, frame: Frame | None, phases: Phases, waits: _Waits, kinds: dict[str, float],
    modules: dict[str, ModuleTime],
) -> None:  # fmt: skip
    own = frame.kind if frame is not None else None
    pieces = [(start, end, own or HOST)]
    if own in (None, HOST):
        wait = waits.wait(start, end)
        if wait is not None and wait.end > wait.start:
            pieces = [(start, wait.start, HOST), (wait.start, wait.end, EXPOSED), (wait.end, end, HOST)]
    for begin, until, kind in pieces:
        for piece_start, piece_end, phase in phases.split(begin, until):
            shown, seconds = _in_phase(kind, phase), piece_end - piece_start
            kinds[shown] = kinds.get(shown, 0.0) + seconds
            module = (frame.module if frame is not None else "") or OUTSIDE[phase]
            backward = frame.backward if frame is not None else False
            modules.setdefault(module, ModuleTime()).add(shown, seconds, backward or phase == "backward")


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals, as disjoint ones in order."""
    found: list[Interval] = []
    for interval in sorted(intervals, key=lambda each: each.start):
        if found and interval.start <= found[-1].end:
            found[-1] = Interval(found[-1].start, max(found[-1].end, interval.end))
        else:
            found.append(interval)
    return found


def _overlap(merged: Sequence[Interval], interval: Interval) -> float:
    return sum(max(0.0, min(each.end, interval.end) - max(each.start, interval.start)) for each in merged)


# --- an accelerator's time -------------------------------------------------------------------------------------


def _divide_device(trace: Trace, phases: Phases, frames: HostFrames, found: Breakdown) -> None:
    """Divides the time between the first mark and the end of the last kernel."""
    if not phases.steps:
        return
    last = max((span.end for span in trace.device), default=0.0)
    steps = [(number, list(intervals)) for number, intervals in phases.steps]
    tail = steps[-1][1][-1]
    steps[-1][1][-1] = Interval(tail.start, max(tail.end, last))
    labelled = [_device_label(span, frames, phases) for span in trace.device]
    for number, intervals in steps:
        kinds: dict[str, float] = {}
        hidden = 0.0
        for interval in intervals:
            hidden += _divide_device_interval(interval, labelled, phases, kinds, found.modules)
        wall = sum(interval.end - interval.start for interval in intervals)
        found.steps.append(StepTime(number, wall, kinds, hidden))


@dataclass(slots=True)
class _Work:
    """Work of the device.

    Attributes:
        start: Start in seconds.
        end: End in seconds.
        kind: Kind of work.
        rank: Precedence: 0 for computation, 1 for collectives, 2 for copies.
        module: Name of the module.
        backward: Whether it belongs to a backward.
    """

    start: float
    end: float
    kind: str
    rank: int
    module: str
    backward: bool


def _device_label(span: Any, frames: HostFrames, phases: Phases) -> _Work:
    frame = frames.of_operator.get(span.operator) if span.operator is not None else None
    launched = frame.span.start if frame is not None else span.start
    phase = phases.at(launched)
    if span.is_collective:
        kind = EXPOSED
    else:
        kind = kind_of_kernel(span.name, span.category, frame.kind if frame is not None else None)
        kind = OPTIMIZER if phase == "optimizer" and kind != EXPOSED else kind
        kind = COPIES if kind == EXPOSED else kind  # What a collective copies to and from its buffers.
    module = (frame.module if frame is not None else "") or OUTSIDE[phase]
    backward = (frame.backward if frame is not None else False) or phase == "backward"
    rank = 1 if kind == EXPOSED else 2 if kind == COPIES and span.category != "kernel" else 0
    return _Work(span.start, span.end, kind, rank, module, backward)


def _divide_device_interval(
    interval: Interval, work: Sequence[_Work], phases: Phases, kinds: dict[str, float], modules: dict[str, ModuleTime]
) -> float:
    """Divides an interval among the work that runs in it; returns the time of hidden collectives."""
    own = [each for each in work if each.end > interval.start and each.start < interval.end]
    edges = sorted(
        {interval.start, interval.end, *(t for w in own for t in (w.start, w.end) if interval.start < t < interval.end)}
    )
    active: list[_Work] = []
    pending, hidden = 0, 0.0
    for begin, until in itertools.pairwise(edges):
        active = [each for each in active if each.end > begin]
        while pending < len(own) and own[pending].start <= begin:
            active.append(own[pending])
            pending += 1
        if active:
            chosen = min(active, key=lambda each: each.rank)
            if chosen.rank != 1 and any(each.rank == 1 for each in active):
                hidden += until - begin
            kinds[chosen.kind] = kinds.get(chosen.kind, 0.0) + until - begin
            modules.setdefault(chosen.module, ModuleTime()).add(chosen.kind, until - begin, chosen.backward)
            continue
        for start, end, phase in phases.split(begin, until):
            kind = DATA if phase == "data" else HOST
            kinds[kind] = kinds.get(kind, 0.0) + end - start
            modules.setdefault(OUTSIDE[phase], ModuleTime()).add(kind, end - start, phase == "backward")
    return hidden
