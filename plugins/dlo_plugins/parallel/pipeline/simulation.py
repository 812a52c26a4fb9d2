"""Timelines of a step: simulated from the costs of a schedule's actions, or recorded on the ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dlo_framework.errors import DloError
from dlo_plugins.parallel.pipeline.pipeline_schedules import Action, ActionKind, Placement, Schedule


class Deadlock(DloError):
    """Schedule in which ranks wait for each other in a cycle."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of a micro-batch in each stage, in seconds or any other unit.

    Attributes:
        forward: Cost of the forward of each stage.
        input: Cost of the input gradient of each stage.
        weight: Cost of the weight gradients of each stage; a full backward costs `input` plus `weight`. A recomputation
            costs `forward`.
        transfer: Time to send a hidden state or its gradient to another rank; both ranks compute meanwhile.
    """

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0

    @classmethod
    def equal(cls, stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0) -> StageCosts:
        """Returns the same costs for all stages."""
        return cls([forward] * stages, [input] * stages, [weight] * stages)

    def cost_of(self, action: Action) -> float:
        """Returns an action's cost."""
        stage = action.stage
        match action.kind:
            case ActionKind.FORWARD | ActionKind.RECOMPUTE:
                return self.forward[stage]
            case ActionKind.BACKWARD:
                return self.input[stage] + self.weight[stage]
            case ActionKind.INPUT:
                return self.input[stage]
        return self.weight[stage]


@dataclass(frozen=True)
class TimedAction:
    """Action with its start and end time."""

    action: Action
    start: float
    end: float


@dataclass
class Timeline:
    """Timeline of a step.

    Attributes:
        rows: Timed actions of each rank, in order.
    """

    rows: list[list[TimedAction]] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        timed = [item for row in self.rows for item in row]
        return max(item.end for item in timed) - min(item.start for item in timed) if timed else 0.0

    @property
    def busy(self) -> list[float]:
        """Time that each rank computes."""
        return [sum(item.end - item.start for item in row) for row in self.rows]

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time in which they wait, between 0 and 1."""
        total = self.makespan * len(self.rows)
        return 1.0 - sum(self.busy) / total if total else 0.0


def dependencies(action: Action, stages: int) -> list[tuple[bool, int]]:
    """Returns the actions of the same micro-batch that an action waits for, as `(is_backward, stage)`.

    A backward waits for its stage's forward, and a weight gradient for its input gradient; both are in the order of the
    same rank. So is a recomputation's forward.
    """
    if action.kind is ActionKind.FORWARD:
        return [(False, action.stage - 1)] if action.stage > 0 else []
    if action.kind is ActionKind.RECOMPUTE:
        return [(False, action.stage)]
    if action.is_backward:
        return [(False, action.stage)] + ([(True, action.stage + 1)] if action.stage + 1 < stages else [])
    return [(True, action.stage)]


def simulate(schedule: Schedule, costs: StageCosts | MeasuredCosts) -> Timeline:
    """Returns the timeline of a schedule in which each rank runs each action of its order as early as possible.

    What a schedule without flushes has left to this step from the one before is ready when the step begins.

    Args:
        schedule: Schedule.
        costs: Costs of its actions.

    Raises:
        Deadlock: If no rank can continue; the message says what each rank waits for.
    """
    where = schedule.placement
    ends: dict[tuple[bool, int, int], float] = {} if schedule.flushes else _ended_before(schedule)
    at = [0] * where.ranks
    clock = [0.0] * where.ranks
    timeline = Timeline([[] for _ in range(where.ranks)])
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                ready = _ready(action, ends, where, costs.transfer)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                clock[rank] = end = start + costs.cost_of(action)
                if action.kind not in (ActionKind.WEIGHT, ActionKind.RECOMPUTE):
                    ends[action.is_backward, action.stage, action.micro_batch] = end
                timeline.rows[rank].append(TimedAction(action, start, end))
                at[rank] += 1
                moved = True
    orders = zip(at, schedule.orders, strict=True)
    stuck = [f"rank {rank} at {order[n]}" for rank, (n, order) in enumerate(orders) if n < len(order)]
    if stuck:
        raise Deadlock(
            f"ranks must not wait for each other in a cycle under schedule {schedule.name}, got {', '.join(stuck)} wait"
            " for one another; order each rank's actions so that what they wait for comes first"
        )
    return timeline


def _ended_before(schedule: Schedule) -> dict[tuple[bool, int, int], float]:
    """Returns the actions of the step before, which ended when this step begins."""
    own = {(a.is_backward, a.stage, a.micro_batch) for order in schedule.orders for a in order}
    stages, most = schedule.placement.stages, max(schedule.micro_batches, schedule.placement.stages)
    before = {(backward, s, -n) for backward in (False, True) for s in range(stages) for n in range(1, most + 1)}
    return dict.fromkeys(before - own, 0.0)


def _ready(
    action: Action, ends: Mapping[tuple[bool, int, int], float], where: Placement, transfer: float
) -> float | None:
    ready = 0.0
    for backward, stage in dependencies(action, where.stages):
        end = ends.get((backward, stage, action.micro_batch))
        if end is None:
            return None
        apart = where.rank_of(stage) != where.rank_of(action.stage)
        ready = max(ready, end + transfer * apart)
    return ready


class Recorder:
    """Recorder of the start and end of each action, which does not synchronise with the device.

    Args:
        device: Device on which the actions run.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type == "cpu"
        self._device = device
        self._origin: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []

    def begin(self, group: dist.ProcessGroup) -> None:
        """Starts a step: sets all ranks' clocks to zero after a barrier."""
        self._marks.clear()
        dist.barrier(group)
        self._origin = self.now()

    def now(self) -> Any:
        """Returns a mark of the current point in the device's work."""
        if self._on_host:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def add(self, action: Action, start: Any, end: Any) -> None:
        """Records an action."""
        self._marks.append((action, start, end))

    def timed(self) -> list[TimedAction]:
        """Returns the last step's actions, with times in seconds since its beginning; waits for the device."""
        return [TimedAction(action, self._since(start), self._since(end)) for action, start, end in self._marks]

    def _since(self, mark: Any) -> float:
        if self._on_host:
            return mark - self._origin
        mark.synchronize()
        return self._origin.elapsed_time(mark) / 1000


def gather_timeline(own: list[TimedAction], group: dist.ProcessGroup) -> Timeline:
    """Returns the timeline of all ranks, on all ranks."""
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, own, group)
    return Timeline(rows)


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured time of each action of a step, as costs for :func:`~dlo_plugins.parallel.pipeline.simulation.simulate`.

    Attributes:
        taken: Time of each action in seconds.
        transfer: Time to send a hidden state to another rank; 0.
    """

    taken: Mapping[Action, float]
    transfer: float = 0.0

    @classmethod
    def from_timeline(cls, timeline: Timeline) -> MeasuredCosts:
        """Returns the costs of a measured step."""
        return cls({item.action: item.end - item.start for row in timeline.rows for item in row})

    def cost_of(self, action: Action) -> float:
        """Returns the time of an action in seconds."""
        return self.taken[action]

    def mean(self, *kinds: ActionKind) -> float:
        """Returns the mean time of the actions of some kinds; 0 if there was none."""
        times = [taken for action, taken in self.taken.items() if action.kind in kinds]
        return sum(times) / len(times) if times else 0.0
