"""Stages of a model: which stage owns which tensor, and the release of the tensors of other ranks' stages.

A model stays one module with all its names. Parameters that a rank does not hold are on the meta device: optimizer
groups and checkpoints know all names, and these parameters take no memory. :mod:`dlo_plugins.pipeline.gates` runs the
forward of a single stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan


class Stages:
    """Stages of a model: contiguous blocks, the first stage with the stem, the last with the head.

    Args:
        model: Model, on any device; it may have been cut already.
        plan: Plan of the model; its names are relative to the model.
        counts: Number of blocks of each stage.

    Attributes:
        blocks: Names of all blocks, in the order in which they run.
        first: Number of each stage's first block; the last item is the number of blocks.
        stem_units: Names of the modules with parameters that run before the first block.
        stem_tensors: Names of the stem's parameters that belong to none of these modules.
        absent_heads: Names of the modules after the last block of which each stage lacks parameters.

    Raises:
        DloError: If the counts do not add up to the number of blocks, or a stage has none.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan, counts: Sequence[int]) -> None:
        self.blocks = plan.block_names(model, repeated=True)
        check_counts(counts, len(self.blocks))
        self.first = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        self.stem_units, heads = _units(model, plan.stem), _units(model, plan.head)
        self._stages: dict[str, tuple[int, ...]] = {}
        self._plan = plan
        shared: dict[int, set[int]] = {}
        found: dict[str, Tensor] = {}
        for name, tensor in _named_tensors(model):
            stage = self._own_stage(name, isinstance(tensor, nn.Parameter))
            if stage is not None:
                shared.setdefault(id(tensor), set()).add(stage)
                found[name] = tensor
        for name, tensor in found.items():
            self._stages[name] = tuple(sorted(shared[id(tensor)]))
        units = {head: [of for name, of in self._stages.items() if name.startswith(head + ".")] for head in heads}
        self.absent_heads = [
            [head for head, stages in units.items() if any(stage not in of for of in stages)]
            for stage in range(self.count)
        ]
        stem_parameters = (name for name, tensor in found.items() if isinstance(tensor, nn.Parameter))
        self.stem_tensors = tuple(
            name
            for name in stem_parameters
            if self._block_of(name) is None and plan.owners(name)[:1] == ["stem"] and self._unit_of(name) is None
        )

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.first) - 1

    def blocks_of(self, stage: int) -> list[str]:
        """Returns the names of a stage's blocks."""
        return self.blocks[self.first[stage] : self.first[stage + 1]]

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Returns the stages that need a parameter or buffer: one, or several where it is tied.

        Buffers of modules without parameters, such as tables of angles, belong to every stage.
        """
        return self._stages.get(name, tuple(range(self.count)))

    def shared_buffers(self, model: nn.Module) -> list[str]:
        """Returns the names of the buffers that modules with parameters in several stages share."""
        return [name for name, _ in model.named_buffers() if len(self._stages.get(name, ())) > 1]

    def writer_stage(self, name: str) -> int | None:
        """Returns the stage that may change a buffer of which every stage has a copy; None for other tensors.

        It is the first stage for a buffer of the stem. Other such buffers are used in the head, or before the blocks on
        every stage in the same way: there it is the last stage.
        """
        if name in self._stages:
            return None
        return 0 if self._plan.owners(name)[:1] == ["stem"] else self.count - 1

    def _unit_of(self, name: str) -> str | None:
        return next((unit for unit in self.stem_units if name.startswith(unit + ".")), None)

    def _block_of(self, name: str) -> int | None:
        return next((n for n, block in enumerate(self.blocks) if name.startswith(block + ".")), None)

    def _own_stage(self, name: str, is_parameter: bool) -> int | None:
        block = self._block_of(name)
        if block is not None:
            return next(stage for stage in range(self.count) if block < self.first[stage + 1])
        if is_parameter:
            return 0 if self._plan.owners(name)[:1] == ["stem"] else self.count - 1
        return 0 if self._unit_of(name) is not None else None


class StageOwnership:
    """Predicate for the parameters and buffers that a rank of the pipeline holds.

    Args:
        stages: Stages of the model.
        held: Numbers of this rank's stages.
    """

    def __init__(self, stages: Stages, held: Collection[int]) -> None:
        self.stages, self.own_stages = stages, frozenset(held)

    def __call__(self, name: str) -> bool:
        """Returns whether this rank holds a parameter or buffer, or a copy of a tied one."""
        return not self.own_stages.isdisjoint(self.stages.stages_of(name))

    def is_first_holder(self, name: str) -> bool:
        """Returns whether this rank counts and saves a tensor: it holds the first of the tensor's stages."""
        return self.stages.stages_of(name)[0] in self.own_stages


def release_other_stages(model: nn.Module, stages: Stages, held: Collection[int]) -> StageOwnership:
    """Replaces the parameters and buffers of other ranks' stages by meta tensors under the same names.

    Args:
        model: Model, changed in place; tied parameters stay one tensor.
        stages: Stages of the model.
        held: Numbers of this rank's stages.

    Returns:
        A predicate for the names that this rank holds.
    """
    holds = StageOwnership(stages, held)
    gone: dict[int, Tensor] = {}
    for name, tensor in list(_named_tensors(model)):
        if holds(name):
            continue
        empty = gone.get(id(tensor))
        if empty is None:
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            gone[id(tensor)] = empty
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = empty  # type: ignore[assignment]
    return holds


def check_stages(blocks: int, stages: int) -> None:
    """Checks that there is a block for each stage.

    Raises:
        DloError: If there are fewer blocks than stages.
    """
    if stages > blocks:
        raise DloError(
            f"each stage must have at least one block, got {blocks} blocks for {stages} stages; set pp times"
            f" stages_per_rank to {blocks} or less"
        )


def check_counts(counts: Sequence[int], blocks: int) -> None:
    """Checks the number of blocks of each stage.

    Raises:
        DloError: If the counts do not add up to the number of blocks, or a stage has none.
    """
    check_stages(blocks, len(counts))
    if any(count < 1 for count in counts) or sum(counts) != blocks:
        even = [blocks // len(counts) + (n < blocks % len(counts)) for n in range(len(counts))]
        raise DloError(
            f"split must give each stage at least one block and add up to the model's {blocks} blocks, got"
            f" {list(counts)} ({sum(counts)} blocks); set {even}"
        )


def _units(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the outermost modules with parameters that a forward calls, of those that patterns name."""
    units: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(unit + ".") for unit in units)
        if name and not inside and _matches(patterns, name):
            units += _called_modules(name, module)
    return tuple(units)


def _called_modules(name: str, module: nn.Module) -> Iterator[str]:
    """Yields a module with parameters; for a container, which no forward calls, the modules inside it instead."""
    if next(module.parameters(), None) is None:
        return
    if type(module).forward is not nn.Module.forward:
        yield name
        return
    for child, inner in module.named_children():
        yield from _called_modules(f"{name}.{child}", inner)


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Whether a pattern names this very module."""
    return any(ParallelPlan(stem=(pattern,)).owners(name) and _depth(pattern, name) for pattern in patterns)


def _depth(pattern: str, name: str) -> bool:
    parent = name.rpartition(".")[0]
    return not parent or not ParallelPlan(stem=(pattern,)).owners(parent)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
