"""Balanced split of blocks into stages: contiguous, with the least cost of the most expensive stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlo_framework.errors import DloError


def balance_stages(costs: Sequence[float], stages: int, stem: float = 0.0, head: float = 0.0) -> list[int]:
    """Returns the number of blocks of each stage, by dynamic programming: exact, O(blocks^2 stages).

    Among the splits with the least maximum cost of a stage, it returns one with the least sum of squared costs, so that
    the other stages are balanced too.

    Args:
        costs: Costs of the blocks, in any unit.
        stages: Number of stages; each gets at least one block.
        stem: Cost of the modules that the first stage runs before its blocks.
        head: Cost of the modules that the last stage runs after its blocks.

    Raises:
        DloError: If there are fewer blocks than stages.
    """
    blocks = len(costs)
    check_stages(blocks, stages)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, first: int, end: int) -> float:
        return sums[end] - sums[first] + stem * (stage == 0) + head * (stage == stages - 1)

    least, _ = _best(blocks, stages, lambda best, stage, first, end: max(best, cost_of(stage, first, end)))

    def spread(best: float, stage: int, first: int, end: int) -> float:
        cost = cost_of(stage, first, end)
        return best + cost * cost if cost <= least else float("inf")

    return _best(blocks, stages, spread)[1]


def check_stages(blocks: int, stages: int) -> None:
    """Checks that there is a block for each stage.

    Raises:
        DloError: If there are fewer blocks than stages.
    """
    if stages > blocks:
        raise DloError(
            f"each stage must have at least one block, got {blocks} blocks for {stages} stages; set pp times"
            f" stages_per_rank to {blocks} or less"
        )


def _best(blocks: int, stages: int, join: Callable[[float, int, int, int], float]) -> tuple[float, list[int]]:
    """Returns the least value of a split, and the split.

    Args:
        blocks: Number of blocks.
        stages: Number of stages.
        join: Function that returns the value of the stages up to one of them, from the value of those before it, its
            number, its first block and its end.
    """
    best = [0.0] + [float("inf")] * blocks  # by the number of blocks in the stages so far
    begins: list[list[int]] = []
    for stage in range(stages):
        found, begin = [float("inf")] * (blocks + 1), [0] * (blocks + 1)
        for end in range(stage + 1, blocks + 1):
            values = [(join(best[first], stage, first, end), first) for first in range(stage, end)]
            found[end], begin[end] = min(values)
        best = found
        begins.append(begin)
    counts, end = [], blocks
    for begin in reversed(begins):
        counts.append(end - begin[end])
        end = begin[end]
    return best[blocks], counts[::-1]
