"""From a model, a plan and the settings to stages, and whether they fit: what can be said before a process starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.pipeline.balance import balanced_split
from dlo_plugins.pipeline.costs import PartCosts, parameter_costs
from dlo_plugins.pipeline.cutting import Stages
from dlo_plugins.pipeline.schedules import make_schedule, placement

Split = Sequence[int] | Literal["balanced"]


def make_stages(
    model: nn.Module, plan: ParallelPlan, stages: int, split: Split = "balanced", costs: PartCosts | None = None
) -> Stages:
    """Returns a model's stages, without cutting it.

    Args:
        model: may lie on the meta device.
        plan: names are relative to the model.
        stages: how many.
        split: blocks of each stage, or `balanced` by cost.
        costs: by which it is balanced; by default the numbers of parameters.

    Raises:
        DloError: for a split that does not fit.
    """
    if isinstance(split, str):
        if split != "balanced":
            raise DloError(f"split is 'balanced' or the number of blocks of each stage, given '{split}'")
        known = costs or parameter_costs(model, plan)
        return Stages(model, plan, balanced_split(known.blocks, stages, known.stem, known.head))
    if len(split) != stages:
        even = balanced_split([1.0] * len(plan.block_names(model)), stages)
        raise DloError(
            f"split has a number of blocks for each of the {stages} stages (pp times stages_per_rank), given"
            f" {list(split)}; {even}, say, or 'balanced'"
        )
    return Stages(model, plan, split)


def check(
    model: nn.Module,
    plan: ParallelPlan,
    ranks: int,
    schedule: str,
    micro_batches: int,
    stages_per_rank: int | None = None,
    split: Split = "balanced",
) -> Stages:
    """Checks that a model can be cut for so many ranks, and that the schedule can run so many micro-batches.

    Args:
        model: may lie on the meta device.
        plan: names are relative to the model.
        ranks: of the pipeline.
        schedule: its name.
        micro_batches: of a step.
        stages_per_rank: where the schedule leaves it open.
        split: blocks of each stage, or `balanced`.

    Returns:
        The stages, as they will be.

    Raises:
        DloError: if something does not fit; the message computes what does.
    """
    where = placement(schedule, ranks, stages_per_rank)
    make_schedule(schedule, ranks, micro_batches, stages_per_rank)
    blocks = len(plan.block_names(model))
    if where.stages > blocks:
        per_rank = where.stages_per_rank
        most = blocks // per_rank
        fix = f"set pp={most} or less" if most else "choose 1F1B, which has one stage a rank"
        raise DloError(
            f"each pipeline stage has at least one block: {ranks} ranks with {per_rank} stage{'s' * (per_rank > 1)}"
            f" each need {where.stages}, the model has {blocks}; {fix}"
        )
    return make_stages(model, plan, where.stages, split)
