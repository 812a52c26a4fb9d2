"""Says which rank of a run is slow, and why: computation, host, data loader or links.

Ranks of a synchronous step wait for the slowest one inside their collectives. So the time that a rank does not wait is
its own, and the rank with the most of its own time holds the others up. What even the last rank to arrive waits is the
transfer itself, which no rank can avoid: the links.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlo_plugins.profiling.operation_kinds import DATA, EXPOSED, HOST
from dlo_plugins.profiling.step_breakdown import Breakdown

#: Fraction of a step by which a rank's own time must exceed the others' median, to be called slow.
SLOW = 0.1
#: Fraction of the steps in which a slow rank must have the most time of its own.
LEADS = 2 / 3
#: Fraction of a step that every rank waits, from which the links are named.
LINKS = 0.25
_CAUSES = ("compute", "data", "host")


@dataclass(frozen=True)
class RankStep:
    """Times of a step on a rank, in seconds.

    Attributes:
        wall: Time of the step.
        compute: Time in operators: products, attention, elementwise work, copies, the optimizer.
        wait: Time in which it waited for collectives.
        data: Time in which it waited for the data loader.
        host: Other time: Python and launches.
    """

    wall: float
    compute: float
    wait: float
    data: float
    host: float

    @property
    def own(self) -> float:
        """Time that the rank needed by itself."""
        return self.wall - self.wait


def rank_steps(breakdown: Breakdown) -> list[RankStep]:
    """Returns the times of each step of a rank's profile."""
    found = []
    for step in breakdown.steps:
        wait, data, host = (step.kinds.get(kind, 0.0) for kind in (EXPOSED, DATA, HOST))
        found.append(RankStep(step.wall, sum(step.kinds.values()) - wait - data - host, wait, data, host))
    return found


@dataclass(frozen=True)
class RankSummary(RankStep):
    """Median times of a rank's steps.

    Attributes:
        rank: Global rank.
    """

    rank: int


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


def find_straggler(ranks: Mapping[int, Sequence[RankStep]]) -> StragglerReport:
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
    found: int | None = slowest.rank
    if excess > SLOW * wall and leads >= LEADS * count:
        cause = max(by_cause, key=lambda name: by_cause[name])
        text = (
            f"rank {slowest.rank} is slow, by {_ms(excess)} of a step of {_ms(wall)}: {_WORDS[cause]}"
            f" ({_ms(getattr(slowest, cause))}, the others' median is {_ms(getattr(slowest, cause) - by_cause[cause])})"
        )
    elif transfer > LINKS * wall:
        found, cause = None, "links"
        text = (
            f"the links: every rank waits at least {_ms(transfer)} of a step of {_ms(wall)} for collectives, and none"
            f" arrives late"
        )
    else:
        found, cause = None, ""
        text = f"no rank stands out: their own times differ by {_ms(excess)} of a step of {_ms(wall)}"
    everyone = min(rank.data for rank in summaries)
    if cause != "data" and everyone > SLOW * wall:
        text += f"; every rank waits at least {_ms(everyone)} for its data loader"
    return StragglerReport(summaries, found, cause, excess, by_cause, transfer, (leads, count), text)


_WORDS = {
    "compute": "it computes longer",
    "data": "it waits for its data loader",
    "host": "its host is busy between operators: Python, launches, or waits outside torch",
}


def _median(rank: int, steps: Sequence[RankStep]) -> RankSummary:
    def of(name: str) -> float:
        return float(statistics.median(getattr(step, name) for step in steps))

    return RankSummary(of("wall"), of("compute"), of("wait"), of("data"), of("host"), rank)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
