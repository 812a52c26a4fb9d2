"""Divides the time of profiled steps among kinds of work and modules, so that the parts add up to the steps.

It reads a trace that torch's profiler has exported (Chrome's trace format). Categories and arguments are those that
Kineto writes (torch 2.11 to 2.14): `cpu_op`, `user_annotation`, `cuda_runtime`, `kernel`, `gpu_memcpy`, `gpu_memset`
and `cpu_instant_event`. Times are seconds since the first event.

On a CPU, each moment of the training thread belongs to the innermost operator that runs. A moment without an operator
is a wait for a collective if one is in flight and ends before the next operator begins, and otherwise the host's. On an
accelerator, each moment belongs to the kernel that runs; then to a collective or a copy; the device's idle moments are
the host's, or the data loader's while it fetches.

A backward's operators belong to the module of the forward operator with the same sequence number, which autograd gives
both; so no hook is needed in backward.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dlo_plugins.profile.operations import (
    ATTENTION,
    COPIES,
    DATA,
    EXPOSED,
    HOST,
    NORMALISATION,
    OPTIMIZER,
    Work,
    is_costed_as_one,
    kind_of_kernel,
    kind_of_operator,
    operator_cost,
)

#: Beginning of the annotations that separate steps and phases.
MARK = "dlo.mark: "
#: Beginning of the annotations of modules' forwards.
MODULE = "module: "
#: Annotations that last as long as a collective is in flight, on whatever thread.
_IN_FLIGHT = re.compile(r"^(gloo|nccl|mpi|ucc):")
_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "hip_runtime")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(slots=True)
class Span:
    """Operator, annotation or call of the device's runtime on a thread of the host; or a kernel or copy on the device.

    Attributes:
        name: Name of the operator, annotation or kernel.
        start: Start in seconds.
        end: End in seconds.
        category: Category in the trace.
        args: Arguments: shapes, types, sequence number.
        operator: External id of the operator; of a kernel, that of the operator that launched it; None if unknown.
    """

    name: str
    start: float
    end: float
    category: str
    args: Mapping[str, Any]
    operator: int | None

    @property
    def is_collective(self) -> bool:
        """Whether it is a kernel that communicates with other ranks."""
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

    threads: dict[Any, list[Span]] = field(default_factory=dict)
    main: Any = None
    marks: list[tuple[float, str]] = field(default_factory=list)
    in_flight: list[Span] = field(default_factory=list)
    device: list[Span] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a compressed trace file."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
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
        return
    operator = args.get("External id", operators.get(args.get("correlation", -1)))
    span = Span(name, start, end, category, args, operator)
    if category in _DEVICE:
        trace.device.append(span)
    elif category in _HOST and name.startswith(MARK):
        trace.marks.append((end, name.removeprefix(MARK)))
        trace.main = thread
    elif category in _HOST:
        spans = trace.in_flight if _IN_FLIGHT.match(name) else trace.threads.setdefault(thread, [])
        spans.append(span)


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

    span: Span
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
    hidden: float = 0.0

    @property
    def wait(self) -> float:
        """Time in which the rank waited for collectives."""
        return self.kinds.get(EXPOSED, 0.0)

    @property
    def data(self) -> float:
        """Time in which it waited for the data loader."""
        return self.kinds.get(DATA, 0.0)

    @property
    def host(self) -> float:
        """Other time: Python and launches."""
        return self.kinds.get(HOST, 0.0)

    @property
    def compute(self) -> float:
        """Time in operators: products, attention, elementwise work, copies, the optimizer."""
        return sum(self.kinds.values()) - self.wait - self.data - self.host

    @property
    def own(self) -> float:
        """Time that the rank needed by itself."""
        return self.wall - self.wait


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


class Interval(NamedTuple):
    """Interval of time in seconds."""

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
        at_ends = []
        for time in (time for time, name in changes if name == "optimizer"):
            after = times[bisect.bisect_right(times, time) :]
            limit = after[0] if after else float("inf")
            inside = [end for end in ends if time < end <= limit]
            if inside:
                at_ends.append((inside[-1], "between"))
        return at_ends

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

    def _walk(self, spans: Iterable[Span]) -> Iterator[Segment]:
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
            if span.operator is not None and span.category == "cpu_op":
                self.of_operator[span.operator] = frame
        while stack:
            yield cursor, stack[-1].span.end, stack[-1]
            cursor = max(cursor, stack[-1].span.end)
            self._leave(stack)

    def _frame(self, span: Span, stack: list[Frame], last_module: str) -> Frame:
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


class _Piece(NamedTuple):
    """Work that a moment may belong to.

    Attributes:
        start: Start in seconds.
        end: End in seconds.
        kind: Kind of work.
        rank: Precedence: 0 for computation, 1 for collectives, 2 for copies, 3 for collectives that others run beside.
        module: Name of the module.
        backward: Whether it belongs to a backward.
    """

    start: float
    end: float
    kind: str
    rank: int = 0
    module: str = ""
    backward: bool = False


def break_down(trace: Trace, phases: Phases, frames: HostFrames) -> Breakdown:
    """Returns where the time of a trace's steps went.

    Args:
        trace: Trace.
        phases: Phases of the trace.
        frames: Operators of the trace.
    """
    breakdown = Breakdown([], {}, {}, bool(trace.device))
    steps = [(number, list(intervals)) for number, intervals in phases.steps]
    if trace.device and steps:  # The last step ends with the last kernel.
        tail = steps[-1][1][-1]
        steps[-1][1][-1] = Interval(tail.start, max(tail.end, *(span.end for span in trace.device)))
        pieces = [_device_piece(span, frames, phases) for span in trace.device]
    else:
        pieces = _host_pieces(trace, frames, phases)
    for number, intervals in steps:
        step = StepTime(number, sum(interval.end - interval.start for interval in intervals), {})
        for interval in intervals:
            _divide(interval, pieces, phases, step, breakdown.modules)
        breakdown.steps.append(step)
    for frame in frames.costed:
        phase, at = phases.at(frame.span.start), frame.span.start
        if any(start <= at < end for _, intervals in phases.steps for start, end in intervals):
            assert frame.cost is not None
            breakdown.work.setdefault(_in_phase(frame.kind or HOST, phase), Work()).include(frame.cost)
            breakdown.modules.setdefault(frame.module or OUTSIDE[phase], ModuleTime()).include(frame.cost)
    return breakdown


def _divide(
    interval: Interval, pieces: Sequence[_Piece], phases: Phases, step: StepTime, modules: dict[str, ModuleTime]
) -> None:
    """Divides an interval of a step among the pieces that run in it; what none has is the host's or the loader's."""
    own = [each for each in pieces if each.end > interval.start and each.start < interval.end]
    edges = sorted(
        {*interval, *(t for each in own for t in (each.start, each.end) if interval.start < t < interval.end)}
    )
    active: list[_Piece] = []
    pending = 0

    def add(kind: str, seconds: float, module: str, backward: bool) -> None:
        step.kinds[kind] = step.kinds.get(kind, 0.0) + seconds
        modules.setdefault(module, ModuleTime()).add(kind, seconds, backward)

    for begin, until in itertools.pairwise(edges):
        active = [each for each in active if each.end > begin]
        while pending < len(own) and own[pending].start <= begin:
            active.append(own[pending])
            pending += 1
        chosen = min((each for each in active if each.rank < 3), key=lambda each: each.rank, default=None)
        if any(each.kind == EXPOSED for each in active) and (chosen is None or chosen.kind != EXPOSED):
            step.hidden += until - begin
        if chosen is not None:
            add(chosen.kind, until - begin, chosen.module, chosen.backward)
            continue
        for start, end, phase in phases.split(begin, until):
            add(DATA if phase == "data" else HOST, end - start, OUTSIDE[phase], phase == "backward")


def _in_phase(kind: str, phase: str) -> str:
    """Returns the kind under which a table shows work of a kind in a phase."""
    if phase == "data":
        return DATA
    if phase == "optimizer" and kind != EXPOSED:
        return OPTIMIZER
    return kind


def _host_pieces(trace: Trace, frames: HostFrames, phases: Phases) -> list[_Piece]:
    """Returns the work and the waits of the training thread, and the collectives in flight."""
    segments = frames.segments.get(trace.main, [])
    if phases.steps:  # Before and after them nothing runs.
        first, last = phases.steps[0][1][0].start, phases.steps[-1][1][-1].end
        begin, end = (segments[0][0], segments[-1][1]) if segments else (last, last)
        segments = [(min(first, begin), begin, None), *segments, (end, max(last, end), None)]
    ends = sorted((span.end, span.start) for span in trace.in_flight)
    pieces = [_Piece(span.start, span.end, EXPOSED, 3) for span in trace.in_flight]
    for start, end, frame in segments:
        parts = [(start, end, (frame.kind if frame is not None else None) or HOST)]
        if parts[0][2] == HOST:
            # A host that waits for a collective does nothing until it ends: one that ends later is not waited for.
            latest = bisect.bisect_right(ends, (end + _LONGEST_OVERSHOOT, math.inf))
            waits = ends[bisect.bisect_right(ends, (start, math.inf)) : latest]
            begun = max(start, min((each[1] for each in waits), default=end))
            done = min(waits[-1][0], end) if waits else end
            if begun < done:
                parts = [(start, begun, HOST), (begun, done, EXPOSED), (done, end, HOST)]
        for begun, done, kind in parts:
            for one, other, phase in phases.split(begun, done):
                module = (frame.module if frame is not None else "") or OUTSIDE[phase]
                backward = (frame is not None and frame.backward) or phase == "backward"
                pieces.append(_Piece(one, other, _in_phase(kind, phase), 0, module, backward))
    return sorted(pieces)


def _device_piece(span: Span, frames: HostFrames, phases: Phases) -> _Piece:
    frame = frames.of_operator.get(span.operator) if span.operator is not None else None
    phase = phases.at(frame.span.start if frame is not None else span.start)
    kind, rank = EXPOSED, 1
    if not span.is_collective:
        kind = kind_of_kernel(span.name, span.category, frame.kind if frame is not None else None)
        kind = COPIES if kind == EXPOSED else kind  # What a collective copies to and from its buffers.
        kind = OPTIMIZER if phase == "optimizer" else kind
        rank = 2 if kind == COPIES and span.category != "kernel" else 0
    module = (frame.module if frame is not None else "") or OUTSIDE[phase]
    return _Piece(
        span.start, span.end, kind, rank, module, (frame is not None and frame.backward) or phase == "backward"
    )
