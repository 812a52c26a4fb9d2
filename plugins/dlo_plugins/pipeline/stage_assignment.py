"""Stages of a model from its plan and the settings, and the checks of them that need no process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.pipeline.balance import balance_stages
from dlo_plugins.pipeline.costs import PartCosts, parameter_costs
from dlo_plugins.pipeline.model_stages import Stages
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
        even = balance_stages([1.0] * len(plan.block_names(model)), stages)
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
    blocks = len(plan.block_names(model))
    if where.stages > blocks:
        per_rank = where.stages_per_rank
        most = blocks // per_rank
        fix = f"set pp={most} or less" if most else "choose 1F1B, which has one stage a rank"
        raise DloError(
            f"each pipeline stage must have at least one block, got {blocks} blocks for {ranks} ranks with {per_rank}"
            f" stage{'s' * (per_rank > 1)} each ({where.stages} stages); {fix}"
        )
    return make_stages(model, plan, where.stages, split)
