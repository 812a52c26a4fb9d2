"""Counts the micro-batches in flight of each stage on the ranks of a pipeline, by a replay of the schedule."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dlo_plugins.pipeline.actions import ActionKind
from dlo_plugins.pipeline.pipeline_schedules import make_schedule
from dlo_plugins.planner.layout import Layout


@dataclass(frozen=True)
class InFlight:
    """Micro-batches that a rank keeps for backward.

    Attributes:
        stages: Stages of the rank.
        together: Micro-batches of each stage when the rank has most of them.
        most: Largest number of each stage, at whatever time.
    """

    stages: tuple[int, ...]
    together: tuple[int, ...]
    most: tuple[int, ...]


def count_in_flight(layout: Layout) -> tuple[InFlight, ...]:
    """Returns the micro-batches in flight on each rank of a layout's pipeline.

    A stage keeps a micro-batch's activations from its forward until its backward, or until its weight gradient.
    """
    if layout.mesh.pp == 1:
        return (InFlight((0,), (1,), (1,)),)
    # A schedule's steady state repeats, so that more micro-batches keep no more in flight.
    count = min(layout.micro_batches, 4 * layout.stages)
    return _replay(layout.schedule, layout.mesh.pp, count, layout.stages_option)


@functools.lru_cache(maxsize=4096)
def _replay(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None) -> tuple[InFlight, ...]:
    schedule = make_schedule(name, ranks, micro_batches, stages_per_rank)
    ends = ActionKind.WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
    found = []
    for rank, order in enumerate(schedule.orders):
        own = tuple(schedule.placement.stages_of(rank))
        live, most = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
        together = live
        total = largest = 0
        for action in order:
            if action.kind is ActionKind.FORWARD:
                live[action.stage] += 1
                most[action.stage] = max(most[action.stage], live[action.stage])
                total += 1
                if total > largest:
                    together, largest = dict(live), total
            elif action.kind in (ends, ActionKind.BACKWARD):
                live[action.stage] -= 1
                total -= 1
        found.append(InFlight(own, tuple(together[s] for s in own), tuple(most[s] for s in own)))
    return tuple(found)
