"""Which modules are gathered, sharded and recomputed as one: a task's blocks, or what is found by size."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task

#: A model whose blocks nobody names is cut into units of at most this share of its parameters.
SHARE = 1 / 16


def find_units(module: nn.Module) -> list[str]:
    """Returns the names of a module's units, in the order of registration; none lies in another.

    A :class:`~dlo_framework.task.Task` names its blocks in its parallel plan. Of any other module, the repeated
    blocks are taken; where there are none, its largest submodules that hold at most a sixteenth of all parameters.
    A submodule that holds parameters of its own beside children is not cut: its forward may use theirs without
    calling them (``nn.MultiheadAttention`` does).
    """
    if isinstance(module, Task):
        return [f"model.{name}" for name in module.parallel_plan().block_names(module.model)]
    try:
        return ParallelPlan.infer(module).block_names(module)
    except DloError:
        most = SHARE * sum(parameter.numel() for parameter in module.parameters())
        return list(_by_size(module, "", most))


def _by_size(module: nn.Module, prefix: str, most: float) -> Iterator[str]:
    for name, child in module.named_children():
        count = sum(parameter.numel() for parameter in child.parameters())
        if count == 0:
            continue
        holds_own = next(child.parameters(recurse=False), None) is not None
        container = isinstance(child, nn.ModuleList | nn.ModuleDict)  # they have no forward to hook
        if not container and (count <= most or holds_own or next(child.children(), None) is None):
            yield prefix + name
        else:
            yield from _by_size(child, f"{prefix}{name}.", most)
