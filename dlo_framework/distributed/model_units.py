"""Units of a model: the modules that are gathered, sharded and recomputed as one, from the task's plan or by size."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dlo_framework.plan import NoBlocksError, ParallelPlan
from dlo_framework.task import Task

#: Modules that are never called, so that no hook of a forward gathers what they hold.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
#: Largest share of a model's parameters in one unit, where neither a plan nor repetition names its blocks.
SHARE = 1 / 16


def find_units(module: nn.Module) -> list[str]:
    """Returns the names of a module's units, in the order of registration; units do not nest.

    A :class:`~dlo_framework.task.Task` names its blocks in its parallel plan. For any other module, the units are its
    repeated blocks. Where neither has blocks, they are the largest submodules with at most a sixteenth of all
    parameters, since sharding, unlike a pipeline, needs no order of execution. A submodule with both parameters of its
    own and children is not divided: its forward may use the children's parameters without calling them
    (``nn.MultiheadAttention`` does).
    """
    try:
        if isinstance(module, Task):
            return [f"model.{name}" for name in module.parallel_plan().block_names(module.model)]
        names = ParallelPlan.infer(module).block_names(module)
        return [name for name in names if not isinstance(module.get_submodule(name), CONTAINERS)]
    except NoBlocksError:
        most = SHARE * sum(parameter.numel() for parameter in module.parameters())
        first_names = {name for name, _ in module.named_modules()}  # A module that is registered twice is one unit.
        return [name for name in _by_size(module, "", most) if name in first_names]


def _by_size(module: nn.Module, prefix: str, most: float) -> Iterator[str]:
    for name, child in module.named_children():
        count = sum(parameter.numel() for parameter in child.parameters())
        if count == 0:
            continue
        holds_own = next(child.parameters(recurse=False), None) is not None
        if not isinstance(child, CONTAINERS) and (count <= most or holds_own or next(child.children(), None) is None):
            yield prefix + name
        else:
            yield from _by_size(child, f"{prefix}{name}.", most)
