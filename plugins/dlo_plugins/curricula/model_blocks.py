"""Blocks of a run's model in the order of execution, and the units from the stem to the head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning.pytorch import LightningModule
from torch import nn

from dlo_framework.distributed.checkpointing import plain_name
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan, match_names
from dlo_framework.task import Task


class ModelBlocks:
    """Blocks of a model by its parallel plan.

    Args:
        module: LightningModule with its model built.
        what: Name of the callback, for messages.

    Attributes:
        names: Names of all blocks, in the order of execution, relative to the model.
        model: Model that the names are relative to.

    Raises:
        DloError: If the plan names no blocks.
    """

    def __init__(self, module: LightningModule, what: str) -> None:
        is_task = isinstance(module, Task)
        self.model: nn.Module = module.model if isinstance(module, Task) else module
        self.plan = module.parallel_plan() if isinstance(module, Task) else ParallelPlan.infer(module)
        self.names = self.plan.block_names(self.model)
        self._prefix = "model." if is_task else ""
        if not self.names:
            raise DloError(
                f"{what}: the parallel plan must name blocks, got none of {type(module).__name__}; name them in"
                " Task.parallel_plan: ParallelPlan(blocks=(...))"
            )

    def block(self, name: str) -> nn.Module:
        """Returns a block."""
        return self.model.get_submodule(name)

    def without(self, skip: Sequence[str], what: str) -> list[str]:
        """Returns the names of the blocks that no pattern of ``skip`` matches.

        Raises:
            DloError: If a pattern matches no block, or no block is left.
        """
        found = match_names(skip, self.names, self.names, f"{what}: each pattern of skip must match a block")
        left = [name for name in self.names if name not in found]
        if not left:
            raise DloError(f"{what}: skip must leave at least one block, got {list(skip)} for all; remove one of them")
        return left

    @property
    def unit_count(self) -> int:
        """Number of units: the stem, each block, and the head."""
        return len(self.names) + 2

    def unit_of(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the unit of each parameter: 0 for the stem, then the blocks from 1 on, then the head.

        A parameter that is tied to one of a later unit belongs to that one. Parameters outside of the plan, such as
        those of modules that only training uses, belong to the head.

        Args:
            names: Names of parameters of the LightningModule.
        """
        return {name: self._unit(plain_name(name)) for name in names}

    def _unit(self, name: str) -> int:
        if not name.startswith(self._prefix):
            return len(self.names) + 1
        inner = name.removeprefix(self._prefix)
        tied = next((group for group in self.plan.tied if inner in group), (inner,))
        return max(self._own_unit(one) for one in tied)

    def _own_unit(self, name: str) -> int:
        for number, block in enumerate(self.names, start=1):
            if name.startswith(block + "."):
                return number
        return 0 if self.plan.owners(name)[:1] == ["stem"] else len(self.names) + 1
