"""Stages of a model from its plan and the settings, balanced by cost, and the checks that need no process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.pipeline.costs import PartCosts, parameter_costs
from dlo_plugins.pipeline.model_stages import Stages, check_stages
from dlo_plugins.pipeline.pipeline_schedules import make_placement, make_schedule

Split = Sequence[int] | Literal["balanced"]


def make_stages(
    model: nn.Module, plan: ParallelPlan, stages: int, split: Split = "balanced", costs: PartCosts | None = None
) -> Stages:
    """Returns a model's stages, without cutting it.

    Args:
        model: Model, on any device; the meta device will do.
        plan: Plan of the model; its names are relative to the model.
        stages: Number of stages.
        split: Number of blocks of each stage, or `balanced` by cost.
        costs: Costs that the balanced split uses; by default the numbers of parameters.

    Raises:
        DloError: If the split does not fit the model.
    """
    if isinstance(split, str):
        if split != "balanced":
            raise DloError(
                f"split must be 'balanced' or a list with the number of blocks of each stage, got '{split}'; set"
                " split: balanced"
            )
        known = costs or parameter_costs(model, plan)
        return Stages(model, plan, balance_stages(known.blocks, stages, known.stem, known.head))
    if len(split) != stages:
        even = balance_stages([1.0] * len(plan.block_names(model, repeated=True)), stages)
        raise DloError(
            f"split must have a number of blocks for each of the {stages} stages (pp times stages_per_rank), got"
            f" {list(split)}; set {even}, or balanced"
        )
    return Stages(model, plan, split)


def check_pipeline(
    model: nn.Module,
    plan: ParallelPlan,
    ranks: int,
    schedule: str,
    micro_batches: int,
    stages_per_rank: int | None = None,
    split: Split = "balanced",
) -> Stages:
    """Checks that a model can be cut for a number of ranks, and that the schedule can run the micro-batches.

    Args:
        model: Model, on any device; the meta device will do.
        plan: Plan of the model; its names are relative to the model.
        ranks: Number of ranks in the pipeline.
        schedule: Name of the schedule.
        micro_batches: Number of micro-batches in a step.
        stages_per_rank: Number of stages that each rank holds, where the schedule leaves it open.
        split: Number of blocks of each stage, or `balanced`.

    Returns:
        The stages of the model.

    Raises:
        DloError: If the model, the ranks and the schedule do not fit together; the message computes what does.
    """
    where = make_placement(schedule, ranks, stages_per_rank)
    make_schedule(schedule, ranks, micro_batches, stages_per_rank)
    blocks = len(plan.block_names(model, repeated=True))
    if where.stages > blocks:
        per_rank = where.stages_per_rank
        most = blocks // per_rank
        fix = f"set pp={most} or less" if most else "choose 1F1B, which has one stage a rank"
        raise DloError(
            f"each pipeline stage must have at least one block, got {blocks} blocks for {ranks} ranks with {per_rank}"
            f" stage{'s' * (per_rank > 1)} each ({where.stages} stages); {fix}"
        )
    return make_stages(model, plan, where.stages, split)


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
