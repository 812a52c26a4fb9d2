"""Proves tensor rules of a block: ranks with slices of its weights compute what one process computes with all of them.

The ranks are threads of this process, on the CPU without a process group. Backward runs in the thread that calls it, as
all tensors are on the CPU, so that its collectives meet too. The block has random weights and inputs of the shapes of a
run, few samples of them, in double precision (single for large blocks). Compared are outputs, the gradient of the
input, and the gradients of all parameters.
"""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dlo_framework.batches import tree_leaves, tree_map
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan, Rule
from dlo_plugins.parallel.tensor.installation import install_plan
from dlo_plugins.parallel.tensor.rule_candidates import BlockCall, TensorInput
from dlo_plugins.parallel.tensor.tp_plan import TPPlan, region_of
from dlo_plugins.parallel.tensor.tp_planner import SHAPING, make_tp_plan

T = TypeVar("T")
#: Seconds that a rank waits for the others.
_SECONDS = 300.0
#: Entries of a plan that divide layers: mappings of patterns.
_ENTRIES = ("tensor", "head_widths", "head_operands", "shared_features")


def join_plans(plan: ParallelPlan, more: ParallelPlan) -> ParallelPlan:
    """Returns a plan with the rules, widths, operands and shared features of another after its own."""
    joined: Any = {key: {**getattr(plan, key), **getattr(more, key)} for key in _ENTRIES}
    return replace(plan, **joined)


def rename_plan(plan: ParallelPlan, parents: Sequence[str]) -> ParallelPlan:
    """Returns a plan for each of several modules, of one whose names are relative to such a module."""
    renamed: Any = {
        key: {f"{at}.{name}" if name else at: value for at in parents for name, value in getattr(plan, key).items()}
        for key in _ENTRIES
    }
    return ParallelPlan(**renamed)


class _ThreadCommunicator(Communicator):
    """Communicator of ranks that are threads of one process.

    Args:
        barrier: Barrier of the ranks.
        slots: Tensors that the ranks exchange, shared by all.
        rank: Number of this rank.
    """

    def __init__(self, barrier: threading.Barrier, slots: list[Any], rank: int) -> None:
        self._barrier, self._slots, self.rank, self.size = barrier, slots, rank, len(slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ThreadCommunicator:
        return self

    def start_all_gather_parts(self, part: Tensor) -> Callable[[], Tensor]:
        """Returns a function that returns the ranks' tensors, `[size, ...]`."""
        self._slots[self.rank] = part.detach()
        self._barrier.wait()
        gathered = torch.stack(self._slots)
        self._barrier.wait()
        return lambda: gathered

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Returns a function that returns the sum over the ranks."""
        total = self.all_gather_parts(tensor).sum(dim=0)
        return lambda: total

    def start_reduce_scatter_parts(self, parts: Tensor) -> Callable[[], Tensor]:
        """Returns a function that returns this rank's entry of the sum of `[size, ...]`."""
        own = self.all_reduce(parts)[self.rank]
        return lambda: own


def run_on_threads(ranks: int, run: Callable[[Communicator], T]) -> list[T]:
    """Returns the result of a function on each rank.

    Args:
        ranks: Number of ranks.
        run: Function of a rank, which gets the rank's communicator.

    Raises:
        Exception: The first error that a rank raised.
    """
    barrier, slots = threading.Barrier(ranks, timeout=_SECONDS), [None] * ranks

    def run_rank(rank: int) -> T:
        try:
            return run(_ThreadCommunicator(barrier, slots, rank))
        except Exception:  # The other ranks wait for this one.
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run_rank, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]


#: Largest relative difference: code that computes in single precision inside is off by 1e-6, a wrong slice by 1e-1.
_TOLERANCE = 1e-4
#: Number of parameters, and of products, above which a block is computed in single precision.
_LARGE, _LONG = 50_000_000, 10_000_000_000
#: Sizes of the axis to try: heads may not be even.
_RANKS = (2, 3, 5, 7)


class NotProvenError(DloError):
    """Rules whose parts do not give the full result."""


@dataclass
class _Result:
    """Outputs and gradients of a block."""

    outputs: list[Tensor]
    inputs: list[Tensor | None]
    grads: dict[str, Tensor | None]


class BlockProof:
    """Block with values, of which candidates' rules are proved one after the other.

    Args:
        block: Block, or a module of one, on any device; it is not changed.
        call: Arguments of its forward.
        is_block: Whether it is a block, whose own parameters need rules.

    Raises:
        NotProvenError: The block does not run on its own.
    """

    def __init__(self, block: nn.Module, call: BlockCall, is_block: bool = True) -> None:
        self._blocks = ("block",) if is_block else ()
        count = sum(parameter.numel() for parameter in block.parameters())
        shape = tree_leaves((call.args, call.kwargs))[call.hidden].shape
        is_large = count > _LARGE or count * math.prod(shape[:-1]) > _LONG
        for dtype in (torch.float64, torch.float32)[is_large:]:  # Grouped products have no double precision.
            self._dtype, self._least = dtype, 0.0
            self._generator = torch.Generator().manual_seed(0)
            self._holder = nn.ModuleDict({"block": self._with_values(block)}).eval()
            self._call = self._with_inputs(call)
            try:
                self._full = self._run(self._copied())
                break
            except Exception as error:  # Code of the model's that cannot run on random values.
                failure = error
        else:
            raise NotProvenError(f"{type(block).__name__} does not run on its own: {error_line(failure)}") from failure
        largest = [float(grad.abs().max()) for grad in self._full.grads.values() if grad is not None and grad.numel()]
        self._least = 1e-2 * max(largest, default=1.0)

    def prove(self, rules: ParallelPlan) -> dict[str, Rule]:
        """Returns the tensor rules with those of uncut parameters beside the projections added.

        Args:
            rules: Plan with names relative to the block.

        Raises:
            DloError: The rules do not fit the block, or its parts do not give the full result.
        """
        sequential = self._plan(rules, self._sequential(rules))
        tp_plan, ranks = self._divide(sequential)

        def run(communicator: Communicator) -> _Result:
            holder = self._copied()
            install_plan(holder, tp_plan, communicator)
            return self._run(holder)

        try:
            results = run_on_threads(ranks, run)
        except Exception as error:  # Code of the model's that does not run on a slice.
            raise NotProvenError(f"a slice does not run: {error_line(error)}") from error
        for result in results:
            self._compare("output", result.outputs, self._full.outputs)
            self._compare("input's gradient", result.inputs, self._full.inputs)
        more, partial = dict(rules.tensor), set[str]()
        biases = {f"{row}.bias" for region in tp_plan.regions.values() for row in region.rows}
        for name, expected in self._full.grads.items():
            parts = [result.grads[name] for result in results]
            if name in tp_plan.divisions:
                division = tp_plan.divisions[name]
                wanted: list[Tensor | None] = [None] * ranks
                if expected is not None:
                    wanted = [division.slice_for(ranks, rank).slice_tensor(expected) for rank in range(ranks)]
                self._compare(f"gradient of {name}", parts, wanted)
                continue
            is_summed = self._differs(_sum(parts), expected) is None
            if name in tp_plan.partial and is_summed:
                continue  # Such as the bias that the experts' first rank adds.
            local, in_region = name.removeprefix("block."), region_of(tp_plan, name) is not None
            if all(self._differs(part, expected) is None for part in parts):
                if in_region and name not in biases:
                    more.setdefault(local, Rule.SEQUENCE)
            elif in_region and is_summed:
                partial.add(name)
            else:
                raise NotProvenError(f"the gradient of '{local}' differs with slices of the weights")
        more = dict(sorted(more.items(), key=lambda item: item[1] in SHAPING))
        try:
            partial -= make_tp_plan(self._holder, self._plan(rules, more), ranks).partial
        except DloError:
            if not partial:
                raise
        if partial:
            name = min(partial).removeprefix("block.")
            raise NotProvenError(f"the gradient of '{name}' differs, a partial sum on each rank")
        return more  # type: ignore[return-value]

    def _plan(self, rules: ParallelPlan, tensor: Mapping[str, Any]) -> ParallelPlan:
        return replace(rename_plan(replace(rules, tensor=tensor), ["block"]), blocks=self._blocks)

    def _copied(self) -> nn.ModuleDict:
        """Returns a copy of the block whose parameters have gradients of their own, and share values."""
        memo: dict[int, Any] = {
            id(one): nn.Parameter(one.detach(), requires_grad=one.requires_grad) for one in self._holder.parameters()
        }
        return copy.deepcopy(self._holder, memo)

    def _divide(self, plan: ParallelPlan) -> tuple[TPPlan, int]:
        """Returns the division over the smallest number of ranks that divides the block's heads and features."""
        first: DloError | None = None
        for ranks in _RANKS:
            try:
                return make_tp_plan(self._holder, plan, ranks), ranks
            except DloError as error:
                first = first or error
        assert first is not None
        raise first

    def _sequential(self, rules: ParallelPlan) -> dict[str, Any]:
        """Returns rules with `sequence` for all parameters that have none: gradients tell later which are partial."""
        local = {name: rule for name, rule in rules.tensor.items() if rule in SHAPING}
        cut = {name: rule for name, rule in rules.tensor.items() if rule not in SHAPING}
        known = ParallelPlan(tensor=cut)
        names = [name.removeprefix("block.") for name, _ in self._holder.named_parameters()]
        unnamed = [name for name in names if known.rule_for(name) is Rule.REPLICATE]
        return {**cut, **dict.fromkeys(unnamed, Rule.SEQUENCE), **local}

    def _run(self, holder: nn.ModuleDict) -> _Result:
        leaves = tree_leaves(self._call)
        trained = {id(leaves[at]): leaves[at].clone().requires_grad_() for at in self._trained}
        args, kwargs = tree_map(lambda leaf: trained.get(id(leaf), leaf), self._call)
        result = enumerate(tree_leaves(holder["block"](*args, **kwargs)))
        outputs = [leaf for at, leaf in result if isinstance(leaf, Tensor) and (at == 0 or at in self._used)]
        outputs = [leaf for leaf in outputs if leaf.is_floating_point()]
        generator = torch.Generator().manual_seed(1)
        total = sum(
            (leaf * torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf)).sum()
            for leaf in outputs
            if leaf.requires_grad
        )
        if isinstance(total, Tensor):
            total.backward()
        grads = {name: parameter.grad for name, parameter in holder.named_parameters()}
        return _Result([leaf.detach() for leaf in outputs], [leaf.grad for leaf in trained.values()], grads)

    def _compare(self, what: str, actual: list[Any], expected: list[Any]) -> None:
        if len(actual) != len(expected):
            raise NotProvenError(f"its {what} with slices of the weights is {len(actual)} tensors, not {len(expected)}")
        differences = [self._differs(one, other) for one, other in zip(actual, expected, strict=True)]
        if worst := max((text for text in differences if text is not None), key=_size, default=None):
            raise NotProvenError(f"its {what} with slices of the weights {worst}")

    def _differs(self, actual: Tensor | None, expected: Tensor | None) -> str | None:
        if actual is None or expected is None:
            rest = actual if expected is None else expected
            return None if rest is None or not rest.any() else "is missing on one side"
        if actual.shape != expected.shape:
            return f"has the shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        # Some gradients are 0 but for rounding, as that of a bias of keys is.
        scale = max(float(expected.abs().max()), self._least) if expected.numel() else 1.0
        error = float((actual - expected).abs().max()) / scale if expected.numel() else 0.0
        return None if error <= _TOLERANCE else f"differs by {error:.0e}"

    def _with_values(self, block: nn.Module) -> nn.Module:
        """Returns a copy of a block with random parameters."""
        tensors = [*block.parameters(), *block.buffers()]
        made: nn.Module = copy.deepcopy(block, {id(tensor): tensor for tensor in tensors})
        known: dict[int, Tensor] = {}
        for part in made.modules():
            registers: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for entries in registers:
                for key, tensor in list(entries.items()):
                    if tensor is not None:
                        entries[key] = known.setdefault(id(tensor), self._value(tensor))
        return made

    def _value(self, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        if not is_parameter and tensor.device.type != "meta" and type(tensor) is Tensor:
            return tensor.detach().cpu().clone().to(self._dtype if tensor.is_floating_point() else tensor.dtype)
        if not tensor.is_floating_point():
            made = torch.ones if tensor.dtype is torch.bool else torch.zeros
            return made(tensor.shape, dtype=tensor.dtype)
        values = torch.rand(tensor.shape, generator=self._generator, dtype=self._dtype)
        if tensor.ndim > 1:
            values = (values * 2 - 1) * (3 / tensor[0].numel()) ** 0.5
        else:
            values = values + 0.5
        return nn.Parameter(values, requires_grad=True) if is_parameter else values

    def _with_inputs(self, call: BlockCall) -> Any:
        """Returns a call's arguments with values."""

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, TensorInput):
                return leaf
            if leaf.dtype is torch.bool and leaf.shape:  # Masks, whatever they mean: each row has both values.
                numbers = [torch.arange(size).view(-1, *(1,) * at) for at, size in enumerate(reversed(leaf.shape))]
                return (sum(numbers[:2], torch.zeros(leaf.shape, dtype=torch.long)) % 2).bool()
            if not leaf.dtype.is_floating_point:
                return torch.zeros(leaf.shape, dtype=leaf.dtype)
            return torch.randn(leaf.shape, generator=self._generator, dtype=self._dtype)

        leaves = tree_leaves((call.args, call.kwargs))
        self._used = call.used
        self._trained = [
            at
            for at, leaf in enumerate(leaves)
            if isinstance(leaf, TensorInput) and leaf.dtype.is_floating_point and (at == call.hidden or leaf.is_trained)
        ]
        return tree_map(made, (call.args, call.kwargs))


def _size(difference: str) -> float:
    """Returns the number in a difference; infinity for one that has none."""
    last = difference.rpartition(" ")[2]
    return float(last) if re.fullmatch(r"[\d.]+(e[+-]\d+)?", last) else math.inf


def _sum(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.stack(present).sum(dim=0) if present else None


def error_line(error: BaseException) -> str:
    """Returns the class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
