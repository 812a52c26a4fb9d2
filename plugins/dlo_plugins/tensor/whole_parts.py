"""What stays whole on each rank: whether it can, and whether its gradient is then whole too."""

from __future__ import annotations

from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan, Rule
from dlo_plugins.tensor.findings import RegionPlan, Survey, region_of


def find_partial(found: Survey, module: nn.Module, plan: ParallelPlan) -> None:
    """Finds the whole parameters of regions; each rank's activations give them a part of their gradient.

    Raises:
        DloError: for one that needs all features at once, or of which the plan does not say what it works on.
    """
    blocks = set(plan.block_names(module))
    rows = {f"{row}.bias" for region in found.regions.values() for row in region.rows}
    shared = {name for region in found.regions.values() for name in region.shared}
    owners = dict(module.named_modules(remove_duplicate=False))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        around = region_of(found, name)
        if around is None or name in found.divisions or name in rows or plan.rule_for(name) is Rule.SEQUENCE:
            continue
        if name.rpartition(".")[0] in shared:
            found.partial.add(name)
            continue
        if around in blocks or around == "" or any(block.startswith(f"{around}.") for block in blocks):
            raise DloError(
                f"'{name}' lies in '{around}' beside projections that are cut, and the plan does not say whether it"
                " works on whole activations; give it the rule 'sequence' if it does, or put the projections into a"
                " module of their own"
            )
        if _spans_all(owners[name.rpartition(".")[0]], parameter, found.regions[around]):
            raise DloError(
                f"'{name}', of shape {tuple(parameter.shape)}, works on all features at once, of which '{around}' gives"
                " each rank a part; use tp=1, take the module's projections out of the plan's tensor rules, or give it"
                " the rule 'sequence' if it works on what comes in"
            )
        found.partial.add(name)


def _spans_all(owner: nn.Module, parameter: nn.Parameter, region: RegionPlan) -> bool:
    """Whether a parameter of a region is as large as all the features of a projection: then a part will not do."""
    weight = getattr(owner, "weight", None)
    shape = tuple(weight.shape if isinstance(weight, nn.Parameter) else parameter.shape)
    if len(shape) == 1:
        return shape[0] in region.inputs | region.outputs
    return len(shape) > 1 and (shape[0] in region.outputs and shape[1] in region.inputs)


def check_sequence(found: Survey, module: nn.Module, plan: ParallelPlan) -> None:
    """Checks that a model's activations can be split along the sequence between regions.

    Raises:
        DloError: if they cannot, or the plan does not say so.
    """
    modules = dict(module.named_modules())
    for around, region in found.regions.items():
        if any(not isinstance(modules[row], nn.Linear) and not hasattr(modules[row], "nf") for row in region.rows):
            raise DloError(
                f"sequence_parallel splits activations [batch, sequence, width], but '{around}' works on feature maps;"
                " set sequence_parallel: false"
            )
        if around in plan.block_names(module) or len(region.rows) > 1:
            raise DloError(
                f"sequence_parallel gathers the sequence where a module with cut projections begins, and '{around}' is"
                " a whole block; put its projections into modules of their own, or set sequence_parallel: false"
            )
    for block in plan.block_names(module):
        for name, _ in modules[block].named_parameters():
            full = f"{block}.{name}"
            if region_of(found, full) is None and plan.rule_for(full) is not Rule.SEQUENCE:
                raise DloError(
                    f"sequence_parallel splits what passes between cut projections along the sequence, and the plan"
                    f" does not say that '{full}' can work on that; give it the rule 'sequence' if each token is"
                    " treated alone, or set sequence_parallel: false"
                )


def add_sequence_partial(found: Survey, module: nn.Module, plan: ParallelPlan) -> None:
    """Adds the whole parameters of blocks: each rank sees some of the tokens only."""
    for block in plan.block_names(module):
        for name, _ in module.get_submodule(block).named_parameters(remove_duplicate=False):
            if f"{block}.{name}" not in found.divisions:
                found.partial.add(f"{block}.{name}")
