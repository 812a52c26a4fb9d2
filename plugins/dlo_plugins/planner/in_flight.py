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
        inputs: Micro-batches of each stage of which it has only the input then, because it recomputes the others.
    """

    stages: tuple[int, ...]
    together: tuple[int, ...]
    most: tuple[int, ...]
    inputs: tuple[int, ...] = (0,)


def count_in_flight(layout: Layout) -> tuple[InFlight, ...]:
    """Returns the micro-batches in flight on each rank of a layout's pipeline.

    A stage keeps a micro-batch's activations from its forward, or its recomputation, until its backward, or until its
    weight gradient.
    """
    if layout.mesh.pp == 1:
        return (InFlight((0,), (1,), (1,)),)
    return _replay(*replay_key(layout))


def replay_key(layout: Layout) -> tuple[str, int, int, int | None]:
    """Returns what decides the micro-batches in flight: the schedule, ranks, micro-batches and stages of a rank.

    A schedule's steady state repeats, so that more micro-batches keep no more in flight.
    """
    count = min(layout.micro_batches, 4 * layout.stages)
    return layout.schedule, layout.mesh.pp, count, layout.stages_option


@functools.lru_cache(maxsize=4096)
def _replay(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None) -> tuple[InFlight, ...]:
    schedule = make_schedule(name, ranks, micro_batches, stages_per_rank)
    if not schedule.flushes:
        schedule = schedule.unroll(2)
    ends = ActionKind.WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
    recomputed, found = schedule.recomputed_stages, []
    for rank, order in enumerate(schedule.orders):
        own = tuple(schedule.placement.stages_of(rank))
        live, most = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
        inputs = dict.fromkeys(own, 0)
        together, with_inputs = live, inputs
        largest = (0, 0)
        for action in order:
            stage, kind = action.stage, action.kind
            if kind in (ends, ActionKind.BACKWARD):
                live[stage] -= 1
            elif kind is ActionKind.RECOMPUTE or (kind is ActionKind.FORWARD and stage not in recomputed):
                live[stage] += 1
                most[stage] = max(most[stage], live[stage])
                inputs[stage] -= kind is ActionKind.RECOMPUTE
            elif kind is ActionKind.FORWARD:
                inputs[stage] += 1
            size = sum(live.values()), sum(inputs.values())
            if size > largest:
                together, with_inputs, largest = dict(live), dict(inputs), size
        counts = (tuple(of[stage] for stage in own) for of in (together, most, with_inputs))
        found.append(InFlight(own, *counts))
    return tuple(found)
