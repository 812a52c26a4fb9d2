"""Replicated parameters under tensor parallelism: checks, and those whose gradient is a partial sum on each rank."""

from __future__ import annotations

from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan, Rule
from dlo_plugins.tensor.adapted_projections import base_name, base_of
from dlo_plugins.tensor.tp_plan import RegionPlan, TPPlan, region_of


def find_partial(found: TPPlan, module: nn.Module, plan: ParallelPlan) -> None:
    """Finds the replicated parameters of regions, whose gradient is a partial sum on each rank.

    Raises:
        DloError: If a parameter needs all features at once, or the plan has no rule for a parameter that needs one.
    """
    blocks = set(plan.block_names(module))
    owners = dict(module.named_modules(remove_duplicate=False))
    rows = {f"{base_name(row, owners[row])}.bias" for region in found.regions.values() for row in region.rows}
    shared = tuple(f"{name}." for region in found.regions.values() for name in region.shared)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        around = region_of(found, name)
        if around is None or name in found.divisions or name in rows or plan.rule_for(name) is Rule.SEQUENCE:
            continue
        if name in found.partial:
            continue
        if name.startswith(shared):
            found.partial.add(name)
            continue
        owner, region = owners[name.rpartition(".")[0]], found.regions[around]
        if _takes_inputs(owner, parameter, region):
            continue  # It works on full activations, before the column projections or after the row projections.
        if around in blocks or around == "" or any(block.startswith(f"{around}.") for block in blocks):
            if plan.has_rule_for(name):  # The rule `replicate`.
                continue
            raise DloError(
                f"parameter '{name}' must have a rule, as '{around}' contains it and sharded projections, got none; set"
                " the rule 'sequence' if it works on full activations, or move the projections into a module of their"
                " own"
            )
        if _spans_all(owner, parameter, region):
            raise DloError(
                f"parameter '{name}' must not span all features of '{around}', which are sharded, got shape"
                f" {tuple(parameter.shape)}; set tp=1, remove the module's projections from the plan's tensor rules, or"
                " set the rule 'sequence' if it works on the module's input"
            )
        found.partial.add(name)


def _spans_all(owner: nn.Module, parameter: nn.Parameter, region: RegionPlan) -> bool:
    """Returns whether a region's parameter has the size of all features of a projection, and so needs all of them."""
    weight = getattr(owner, "weight", None)
    shape = tuple(weight.shape if isinstance(weight, nn.Parameter) else parameter.shape)
    if len(shape) == 1:
        return shape[0] in region.inputs | region.outputs
    return len(shape) > 1 and (shape[0] in region.outputs and shape[1] in region.inputs)


def _takes_inputs(owner: nn.Module, parameter: nn.Parameter, region: RegionPlan) -> bool:
    """Returns whether a region's parameter works on as many features as enter it, which are not those of a slice."""
    weight = getattr(owner, "weight", None)
    shape = weight.shape if isinstance(weight, nn.Parameter) else parameter.shape
    return len(shape) > 0 and shape[-1] in region.inputs - region.outputs - {region.width}


def check_sequence(found: TPPlan, module: nn.Module, plan: ParallelPlan) -> None:
    """Checks that a model's activations can be split along the sequence between regions.

    Raises:
        DloError: If they cannot, or the plan has no rule 'sequence' for a parameter.
    """
    modules, blocks = dict(module.named_modules()), dict.fromkeys(plan.block_names(module))
    for around, region in found.regions.items():
        if any(isinstance(base_of(modules[row]), nn.Conv2d) for row in region.rows):
            raise DloError(
                "sequence_parallel must have activations [batch, sequence, width], got feature maps in"
                f" '{around}'; set sequence_parallel: false"
            )
        if around in blocks or len(region.rows) > 1:
            raise DloError(
                "sequence_parallel must have sharded projections in modules of their own, where it gathers the"
                f" sequence, got them directly in '{around}'; move them into modules, or set sequence_parallel: false"
            )
    for block in blocks:
        for name, _ in modules[block].named_parameters():
            full = f"{block}.{name}"
            if region_of(found, full) is None and plan.rule_for(full) is not Rule.SEQUENCE:
                raise DloError(
                    f"parameter '{full}' must have the rule 'sequence' for sequence_parallel, which splits its"
                    " activations along the sequence, got none; set the rule if it treats each token separately, or"
                    " set sequence_parallel: false"
                )


def add_sequence_partial(found: TPPlan, module: nn.Module, plan: ParallelPlan) -> None:
    """Adds the replicated parameters of blocks to the plan's partial ones, as each rank has only some tokens."""
    for block in plan.block_names(module):
        for name, _ in module.get_submodule(block).named_parameters(remove_duplicate=False):
            if f"{block}.{name}" not in found.divisions:
                found.partial.add(f"{block}.{name}")
