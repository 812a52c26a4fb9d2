"""Splits a model's blocks over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from dlo_plugins.pipeline.balance import balance_stages


def split_blocks(costs: Sequence[float], stages: int, stem: float, head: float) -> tuple[int, ...]:
    """Returns the number of blocks of each stage, with the least cost of the most expensive stage.

    Equal blocks need no search: among the splits with the least maximum, stages in the middle get the most blocks, as
    the first stages have the most micro-batches in flight.

    Args:
        costs: Costs of the blocks.
        stages: Number of stages.
        stem: Cost of what the first stage runs before its blocks.
        head: Cost of what the last stage runs after its blocks.
    """
    if max(costs) - min(costs) > 1e-9 * max(costs):
        return tuple(balance_stages(costs, stages, stem, head))
    cost, blocks = costs[0], len(costs)
    around = [stem, *[0.0] * (stages - 2), head]
    limits = {count * cost + extra for count in range(1, blocks + 1) for extra in (0.0, stem, head)}
    for limit in sorted(limits):
        most = [int((limit - extra) / cost + 1e-9) for extra in around]
        if min(most) >= 1 and sum(most) >= blocks:
            return tuple(_reduce(most, sum(most) - blocks))
    return tuple(balance_stages(costs, stages, stem, head))


def _reduce(counts: list[int], excess: int) -> list[int]:
    """Returns counts with an excess taken off the largest ones, the first stages before the others."""
    while excess:
        at = counts.index(max(counts))
        counts[at] -= 1
        excess -= 1
    return counts
