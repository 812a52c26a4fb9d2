"""How long a schedule takes, worked out without running it: from what each action costs and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dlo_plugins.pipeline.actions import Action, Kind, Placement
from dlo_plugins.pipeline.schedules import Schedule


class Deadlock(ValueError):
    """Each rank waits for what another does only after what it waits for."""


@dataclass(frozen=True)
class Costs:
    """What a micro-batch costs in each stage, in seconds or any other unit.

    Attributes:
        forward: of each stage.
        input: input gradient of each stage.
        weight: weight gradient of each stage; a full backward costs both.
        transfer: of a hidden state, or its gradient, from rank to rank, while which both may compute.
    """

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0

    @classmethod
    def equal(cls, stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0) -> Costs:
        """Returns the same costs for all stages."""
        return cls([forward] * stages, [input] * stages, [weight] * stages)

    def of(self, action: Action) -> float:
        """Returns an action's cost."""
        stage = action.stage
        match action.kind:
            case Kind.FORWARD:
                return self.forward[stage]
            case Kind.BACKWARD:
                return self.input[stage] + self.weight[stage]
            case Kind.INPUT:
                return self.input[stage]
        return self.weight[stage]


class Costing(Protocol):
    """What tells an action's cost."""

    @property
    def transfer(self) -> float:
        """Of a hidden state, or its gradient, from rank to rank."""
        ...

    def of(self, action: Action) -> float:
        """Returns an action's cost."""
        ...


@dataclass(frozen=True)
class Timed:
    """An action with the time at which it starts and ends."""

    action: Action
    start: float
    end: float


@dataclass
class Timeline:
    """What each rank does when.

    Attributes:
        rows: the actions of each rank, in order.
    """

    rows: list[list[Timed]] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        timed = [item for row in self.rows for item in row]
        return max(item.end for item in timed) - min(item.start for item in timed) if timed else 0.0

    @property
    def busy(self) -> list[float]:
        """How long each rank computes."""
        return [sum(item.end - item.start for item in row) for row in self.rows]

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait, between 0 and 1."""
        total = self.makespan * len(self.rows)
        return 1.0 - sum(self.busy) / total if total else 0.0


def waits_for(action: Action, stages: int) -> list[tuple[bool, int]]:
    """Returns what must be done before an action, of the same micro-batch: `(whether it is a backward, stage)`.

    The weight gradient's own backward, and a backward's own forward, stand before it in the same rank's order.
    """
    if action.kind is Kind.FORWARD:
        return [(False, action.stage - 1)] if action.stage > 0 else []
    if action.is_backward:
        return [(False, action.stage)] + ([(True, action.stage + 1)] if action.stage + 1 < stages else [])
    return [(True, action.stage)]


def simulate(schedule: Schedule, costs: Costing) -> Timeline:
    """Returns when each action starts and ends if each rank runs its own in order, as soon as it can.

    Raises:
        Deadlock: if none can go on; the message says what each rank waits for.
    """
    where = schedule.placement
    ends: dict[tuple[bool, int, int], float] = {}
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
                clock[rank] = end = start + costs.of(action)
                if action.kind is not Kind.WEIGHT:
                    ends[action.is_backward, action.stage, action.micro_batch] = end
                timeline.rows[rank].append(Timed(action, start, end))
                at[rank] += 1
                moved = True
    orders = zip(at, schedule.orders, strict=True)
    stuck = [f"rank {rank} at {order[n]}" for rank, (n, order) in enumerate(orders) if n < len(order)]
    if stuck:
        raise Deadlock(f"{schedule.name}: {', '.join(stuck)} wait for one another")
    return timeline


def _ready(
    action: Action, ends: Mapping[tuple[bool, int, int], float], where: Placement, transfer: float
) -> float | None:
    ready = 0.0
    for backward, stage in waits_for(action, where.stages):
        end = ends.get((backward, stage, action.micro_batch))
        if end is None:
            return None
        apart = where.rank_of(stage) != where.rank_of(action.stage)
        ready = max(ready, end + transfer * apart)
    return ready


def theoretical_bubble(
    name: str, ranks: int, micro_batches: int, costs: tuple[float, float, float] = (1.0, 1.0, 1.0), chunks: int = 1
) -> float:
    """Returns how much longer a step takes than its work, by the papers' formulas, for equal stages.

    Those of the two V schedules hold where the three costs are equal: what is left is the wait for the first forward.

    Args:
        name: of the schedule.
        ranks: of the pipeline.
        micro_batches: of a step; at least `ranks` for the zero-bubble schedules, 2 `ranks` for DualPipeV.
        costs: of a rank's whole share of a micro-batch: forward, input gradient, weight gradient.
        chunks: stages a rank.

    Raises:
        KeyError: for a schedule without a formula.
    """
    forward, input, weight = costs
    backward = input + weight
    formulas = {
        "GPipe": (ranks - 1) * (forward + backward),
        "1F1B": (ranks - 1) * (forward + backward),
        "Interleaved1F1B": (ranks - 1) * (forward + backward) / chunks,
        "ZBH1": (ranks - 1) * (forward + input - weight),
        "ZBV": (ranks - 1) * forward / 2,
        "DualPipeV": (ranks - 1) * forward / 2,
    }
    return formulas[name]
