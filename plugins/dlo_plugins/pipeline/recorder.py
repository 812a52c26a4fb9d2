"""Recorder of a step's timeline, and the measured cost of each action."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dlo_plugins.pipeline.actions import Action, ActionKind
from dlo_plugins.pipeline.simulation import TimedAction, Timeline


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
    mine = [(str(t.action.kind), t.action.stage, t.action.micro_batch, t.start, t.end) for t in own]
    dist.all_gather_object(rows, mine, group)
    return Timeline(
        [[TimedAction(Action(ActionKind(k), s, n), start, end) for k, s, n, start, end in row] for row in rows]
    )


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured time of each action of a step, as costs for :func:`~dlo_plugins.pipeline.simulation.simulate`.

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
        found = [taken for action, taken in self.taken.items() if action.kind in kinds]
        return sum(found) / len(found) if found else 0.0
