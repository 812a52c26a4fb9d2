"""Stages of a model: blocks assigned by cost, which stage owns which tensor, and the release of other ranks' tensors.

A model stays one module with all its names. Parameters that a rank does not hold are on the meta device: optimizer
groups and checkpoints know all names, and these parameters take no memory. :mod:`dlo_plugins.parallel.pipeline.gates`
runs the forward of a single stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dlo_framework.costs import OperatorCounter
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import fake_places, fake_tensors, tensor_places, tensors_replaced
from dlo_framework.plan import ParallelPlan, named_tensors


class Stages:
    """Stages of a model: contiguous blocks, the first stage with the stem, the last with the head.

    Args:
        model: Model, on any device; it may have been cut already.
        plan: Plan of the model; its names are relative to the model.
        counts: Number of blocks of each stage.

    Attributes:
        blocks: Names of all blocks, in the order in which they run.
        first: Number of each stage's first block; the last item is the number of blocks.
        carried: Names of the blocks' arguments that stages pass on with the hidden state.
        stem_units: Names of the stem's modules with parameters, each with the stage that runs it.
        stem_tensors: Names of the stem's parameters that belong to none of these modules, each with its stage.
        absent_heads: Names of the modules after the last block of which each stage lacks parameters.

    Raises:
        DloError: If the counts do not add up to the number of blocks, or a stage has none.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan, counts: Sequence[int]) -> None:
        self.blocks = plan.block_names(model, repeated=True)
        check_counts(counts, len(self.blocks))
        self.first = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        self.carried = plan.carried
        self._stages: dict[str, tuple[int, ...]] = {}
        self._plan = plan
        parts = len(replace(plan, blocks=plan.blocks[:1]).block_names(model, repeated=True))
        self._between = self._stage_of(parts - 1)
        self.stem_units = {unit: self._stem_stage(unit) for unit in _units(model, plan.stem)}
        heads = _units(model, plan.head)
        shared: dict[int, set[int]] = {}
        staged: dict[str, Tensor] = {}
        for name, tensor in named_tensors(model):
            stage = self._own_stage(name, isinstance(tensor, nn.Parameter))
            if stage is not None:
                shared.setdefault(id(tensor), set()).add(stage)
                staged[name] = tensor
        for name, tensor in staged.items():
            self._stages[name] = tuple(sorted(shared[id(tensor)]))
        units = {head: [of for name, of in self._stages.items() if name.startswith(head + ".")] for head in heads}
        self.absent_heads = [
            [head for head, stages in units.items() if any(stage not in of for of in stages)]
            for stage in range(self.count)
        ]
        stem_parameters = (name for name, tensor in staged.items() if isinstance(tensor, nn.Parameter))
        self.stem_tensors = {
            name: self._stem_stage(name)
            for name in stem_parameters
            if self._block_of(name) is None and plan.owners(name)[:1] == ["stem"] and self._unit_of(name) is None
        }

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

    def _stage_of(self, block: int) -> int:
        return next(stage for stage in range(self.count) if block < self.first[stage + 1])

    def _stem_stage(self, name: str) -> int:
        """Returns the stage that runs a module of the stem: the first, unless it is between blocks."""
        return self._between if ParallelPlan(stem=self._plan.between).owners(name) else 0

    def _own_stage(self, name: str, is_parameter: bool) -> int | None:
        block = self._block_of(name)
        if block is not None:
            return self._stage_of(block)
        if is_parameter:
            return self._stem_stage(name) if self._plan.owners(name)[:1] == ["stem"] else self.count - 1
        unit = self._unit_of(name)
        return None if unit is None else self.stem_units[unit]


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
    for name, tensor in list(named_tensors(model)):
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
    for name, module in model.named_modules(remove_duplicate=False):
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
    """Returns whether a pattern names this very module, and not one around it."""
    parent = name.rpartition(".")[0]
    plans = [ParallelPlan(stem=(pattern,)) for pattern in patterns]
    return any(plan.owners(name) and not (parent and plan.owners(parent)) for plan in plans)


@dataclass(frozen=True)
class PartCosts:
    """Costs of a model's parts, all in the same unit.

    Attributes:
        blocks: Cost of each block.
        stem: Cost of the modules before the first block.
        head: Cost of the modules after the last block.
    """

    blocks: tuple[float, ...]
    stem: float = 0.0
    head: float = 0.0


def parameter_costs(model: nn.Module, plan: ParallelPlan) -> PartCosts:
    """Returns the number of parameters of each part; the cost of a matrix product is proportional to it.

    An embedding's look-up costs nothing. The cost of a convolution does not follow from its parameters: use
    :func:`flop_costs` with a micro-batch.

    Args:
        model: Model, on any device; the meta device will do.
        plan: Plan of the model; its names are relative to the model.
    """
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    blocks = plan.block_names(model, repeated=True)
    costs = [0.0] * len(blocks)
    around = {"stem": 0.0, "head": 0.0}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        number = next((n for n, block in enumerate(blocks) if name.startswith(block + ".")), None)
        if number is not None:
            costs[number] += parameter.numel()
        else:
            part = next(iter(plan.owners(name)), "head")
            if not (part == "stem" and id(parameter) in lookups):
                around[part] += parameter.numel()
    return PartCosts(tuple(costs), around["stem"], around["head"])


def flop_costs(model: nn.Module, plan: ParallelPlan, run: Callable[[], Any]) -> PartCosts | None:
    """Returns the floating-point operations of each part in a forward, counted on fake tensors.

    Args:
        model: Full model, not yet cut, on any device; the meta device will do.
        plan: Plan of the model; its names are relative to the model.
        run: Function that calls the model on a micro-batch on the model's device. It may compute a loss too, which
            counts as head.

    Returns:
        The costs; None if the forward fails on fake tensors for any reason, since a cost estimate is not a check.
    """
    numbers: dict[nn.Module, list[int]] = {}  # of a block that is called several times: all of its
    for number, name in enumerate(plan.block_names(model, repeated=True)):
        numbers.setdefault(model.get_submodule(name), []).append(number)
    counts = [0.0] * sum(map(len, numbers.values()))
    counter = OperatorCounter()
    begins: list[int] = []

    def enter(*_: Any) -> None:
        begins.append(counter.get_total_flops())

    def leave(block: nn.Module, *_: Any) -> None:
        for number in numbers[block]:
            counts[number] += (counter.get_total_flops() - begins[-1]) / len(numbers[block])

    # Fake tensors of one element have values, and batch norm counts its batches in such a buffer.
    counters = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.numel() == 1]
    handles = [block.register_forward_pre_hook(enter) for block in numbers]
    handles += [block.register_forward_hook(leave) for block in numbers]
    on_meta = [place for place in tensor_places(model) if place[2].is_meta]
    try:
        with (
            fake_tensors(),
            tensors_replaced(fake_places(on_meta)),  # A forward's own tensors are on the CPU.
            torch.no_grad(),
            counter,
        ):
            run()
    except Exception:  # The rehearsal of the step reports by name what the model refuses.
        return None
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in counters:
            buffer.copy_(value)
    stem = begins[0] if begins else 0
    return PartCosts(tuple(counts), float(stem), counter.get_total_flops() - stem - sum(counts))


Split = Sequence[int] | Literal["balanced"]


def make_stages(model: nn.Module, plan: ParallelPlan, stages: int, split: Split = "balanced") -> Stages:
    """Returns a model's stages, without cutting it.

    Args:
        model: Model, on any device; the meta device will do.
        plan: Plan of the model; its names are relative to the model.
        stages: Number of stages.
        split: Number of blocks of each stage, or `balanced` by cost.

    Raises:
        DloError: If the split does not fit the model.
    """
    if isinstance(split, str):
        if split != "balanced":
            raise DloError(
                f"split must be 'balanced' or a list with the number of blocks of each stage, got '{split}'; set"
                " split: balanced"
            )
        known = parameter_costs(model, plan)
        return Stages(model, plan, balance_stages(known.blocks, stages, known.stem, known.head))
    if len(split) != stages:
        even = balance_stages([1.0] * len(plan.block_names(model, repeated=True)), stages)
        raise DloError(
            f"split must have a number of blocks for each of the {stages} stages (pp times stages_per_rank), got"
            f" {list(split)}; set {even}, or balanced"
        )
    return Stages(model, plan, split)


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
        least, begin = [float("inf")] * (blocks + 1), [0] * (blocks + 1)
        for end in range(stage + 1, blocks + 1):
            values = [(join(best[first], stage, first, end), first) for first in range(stage, end)]
            least[end], begin[end] = min(values)
        best = least
        begins.append(begin)
    counts, end = [], blocks
    for begin in reversed(begins):
        counts.append(end - begin[end])
        end = begin[end]
    return best[blocks], counts[::-1]
