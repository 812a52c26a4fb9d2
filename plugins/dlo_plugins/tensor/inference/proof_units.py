"""Units of a model whose tensor rules are inferred: blocks, or the modules of a block that nothing else divides.

A block is one unit, since its projections may be in its own code. Where blocks have stacked experts, which are divided
without rules, or projections with rules of the family, the units are their outermost modules without them: a proof of
an attention needs neither the values of hundreds of experts nor those of an MLP.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from dlo_framework.experts import find_mixtures
from dlo_framework.plan import ParallelPlan, Rule
from dlo_plugins.tensor.adapted_projections import base_of
from dlo_plugins.tensor.inference.projection_flow import is_projection

#: A projection this many times smaller than its block's largest is too small to look for rules.
_SMALL = 32
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_units(model: nn.Module, plan: ParallelPlan) -> dict[str, bool]:
    """Returns the names of the units without rules, in order, each with whether it is a block of the plan.

    Args:
        model: Model, on any device.
        plan: Plan of the model, with the rules of its family if it has some.
    """
    stacked = {mixture.experts for mixture in find_mixtures(model) if mixture.is_stacked}
    modules = dict(model.named_modules())
    is_done = {
        name: name in stacked or (plan.has_rule_for(name) and plan.rule_for(name) is not Rule.SEQUENCE)
        for name, part in modules.items()
        if name in stacked or is_projection(part, wide=True)
    }
    blocks = plan.block_names(model)
    if not any(is_done[name] for name in is_done if name.startswith(tuple(f"{block}." for block in blocks))):
        return dict.fromkeys(blocks, True)
    found: dict[str, bool] = {}
    for block in blocks:
        children = [f"{block}.{name}" for name, _ in modules[block].named_children()]
        own = _outermost(children, modules, is_done)
        if own or plan.tensor:
            found |= dict.fromkeys(own, False)
        else:  # Projections in the block's own code, beside its experts.
            found[block] = True
    return found


def lacks_rules(model: nn.Module, plan: ParallelPlan) -> bool:
    """Returns whether linear layers of a block have no rule, where a plan has rules for others of the model."""
    for block in plan.block_names(model):
        part = model.get_submodule(block)
        linear = {
            name: cast("nn.Parameter", base_of(module).weight).numel()
            for name, module in part.named_modules()
            if is_projection(module) and not isinstance(base_of(module), nn.Conv2d)
        }
        without = [size for name, size in linear.items() if not plan.has_rule_for(f"{block}.{name}")]
        if sum(_SMALL * size >= max(linear.values()) for size in without) > 1:
            return True
    return False


def _outermost(names: list[str], modules: dict[str, nn.Module], is_done: dict[str, bool]) -> list[str]:
    """Returns the outermost modules with two projections or more, none of them divided by other means."""
    found: list[str] = []
    for name in names:
        if is_done.get(name):
            continue
        within = [other for other in is_done if other.startswith(f"{name}.")]
        if not isinstance(modules[name], _CONTAINERS) and not any(is_done[other] for other in within):
            found += [name] if len(within) > 1 else []
            continue
        children = [f"{name}.{child}" for child, _ in modules[name].named_children()]
        found += _outermost(children, modules, is_done)
    return found
