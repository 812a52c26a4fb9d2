"""Which blocks go to which stage: the contiguous split whose dearest stage is as cheap as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlo_framework.errors import DloError


def balanced_split(costs: Sequence[float], stages: int, stem: float = 0.0, head: float = 0.0) -> list[int]:
    """Returns how many blocks each stage has, by dynamic programming: exact, O(blocks^2 stages).

    Of the splits with the least dearest stage it is one with the least sum of squares: the work left is spread, too.

    Args:
        costs: of the blocks, in any unit.
        stages: how many; each gets at least one block.
        stem: cost of what the first stage computes before its blocks.
        head: cost of what the last stage computes after them.

    Raises:
        DloError: if there are fewer blocks than stages.
    """
    blocks = len(costs)
    if stages > blocks:
        raise DloError(
            f"each stage has at least one block: {stages} stages, {blocks} blocks; set pp times stages_per_rank to"
            f" {blocks} or less"
        )
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


def _best(blocks: int, stages: int, join: Callable[[float, int, int, int], float]) -> tuple[float, list[int]]:
    """Returns the least value of a split, and the split.

    Args:
        blocks: how many there are.
        stages: into which they are split.
        join: the value of the stages up to one, of theirs without it, its number, its first block and its end.
    """
    best = [0.0] + [float("inf")] * blocks  # by how many blocks the stages so far have
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
