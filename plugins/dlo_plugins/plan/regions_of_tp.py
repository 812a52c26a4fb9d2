"""Finds what `tp` and `ep` divide in a model: operations, by the modules that run, parameters, and bytes exchanged."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dlo_framework.batches import tree_leaves
from dlo_framework.errors import DloError
from dlo_framework.models.experts import Mixture, find_mixtures
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.experts.expert_parallel import divisible_mixtures
from dlo_plugins.parallel.tensor.tp_plan import TPPlan, check_divisibility, region_of
from dlo_plugins.parallel.tensor.tp_planner import make_tp_plan
from dlo_plugins.plan.work import Dim, DividedAmount

#: Attributes of a :class:`~dlo_plugins.plan.work.Part` that count its parameters.
_COUNTS = ("parameters", "trained", "fixed", "experts", "trained_experts")


class PassedBytes(NamedTuple):
    """Bytes that the ranks of `tp` communicate for a region's forward and backward.

    Attributes:
        entered: Bytes of the region's input.
        left: Bytes of its output.
    """

    entered: float
    left: float = 0.0


class TensorRegions:
    """Regions of a model that tensor parallelism divides.

    Args:
        model: Model, on any device.
        plan: Plan of the model; None divides nothing.

    Attributes:
        sizes: Sizes of the axis `tp` that divide the model.
        why_not: Reason why it cannot be divided, under the key `tp`.
        divided: Names of the parameters that are divided.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan | None) -> None:
        self._model, self._plan = model, plan
        self.sizes: tuple[int, ...] = (1,)
        self.why_not: dict[str, str] = {}
        self._tp_plan: TPPlan | None = None
        if plan is not None:
            try:
                self._tp_plan = make_tp_plan(model, plan, 1)
                self.sizes = tuple(n for n in range(1, 129) if self._divides(n))
            except DloError as error:
                self.why_not["tp"] = str(error)
        self._names = {id(module): name for name, module in model.named_modules()}
        tp_plan = self._tp_plan or TPPlan()
        self._regions = tp_plan.regions
        self._columns = {name for region in tp_plan.regions.values() for name in region.columns}
        self._rows = {name for region in tp_plan.regions.values() for name in region.rows}
        self._vocabulary = set(tp_plan.vocabulary)
        self._experts = set(tp_plan.experts)
        self.divided = set(tp_plan.divisions)
        self._state: dict[str, str] = {}
        self._passed: dict[str, PassedBytes] = {}

    def _divides(self, tp: int) -> bool:
        assert self._tp_plan is not None
        try:
            check_divisibility(self._tp_plan.divisibilities, tp)
        except DloError as error:
            self.why_not.setdefault(f"tp={tp}", str(error))
            return False
        return True

    def regions_in(self, name: str) -> list[str]:
        """Returns the names of the regions inside a module, and of divided experts."""
        regions = (*self._regions, *self._experts)
        return [key for key in regions if key == name or key.startswith(f"{name}.") or not name]

    def passed_in(self, name: str, default: float) -> PassedBytes:
        """Returns the bytes of all of a module's regions, as last seen.

        Args:
            name: Name of the module.
            default: Bytes of each for a region of which no call was seen.
        """
        unseen = PassedBytes(default, default)
        passed = [self._passed.get(key, unseen) for key in self.regions_in(name)]
        return PassedBytes(*(sum(sizes) for sizes in zip(*passed, strict=True))) if passed else PassedBytes(0.0)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Counts the bytes that enter and leave each region inside the block.

        Autocast makes them differ: what enters has the dtype of the layer before, what leaves that of products.
        """
        with contextlib.ExitStack() as hooks:
            ends = {name: (r.columns[0], r.rows[-1]) for name, r in self._regions.items() if r.columns and r.rows}
            for name, (first, last) in {**ends, **{name: (name, name) for name in self._experts}}.items():
                enter, leave = functools.partial(self._enter, name), functools.partial(self._leave, name)
                hooks.enter_context(self._model.get_submodule(first).register_forward_hook(enter, with_kwargs=True))
                hooks.enter_context(self._model.get_submodule(last).register_forward_hook(leave))
            yield

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, made = _first((args, kwargs)), _first(output)
        if given is not None and made is not None:
            self._passed[name] = PassedBytes(float(given.nbytes), float(made.nbytes))

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        made = _first(output)
        if made is not None and name in self._passed:
            self._passed[name] = self._passed[name]._replace(left=float(made.nbytes))

    def classify(self, stack: list[nn.Module], is_product: bool) -> tuple[Dim, bool | None]:
        """Returns the dim of a product that is divided, and whether the result is divided: None if its operands decide.

        Args:
            stack: Modules whose forward is running, the innermost last.
            is_product: Whether the operation is a matrix product.
        """
        for module in reversed(stack):
            name = self._names.get(id(module), "")
            if name in self._vocabulary:
                is_table = isinstance(module, nn.Embedding)
                return ("", False) if is_table else ("n", True)
            if name in self._experts:
                return self._classify_experts(name, is_product)
            region = region_of(self._tp_plan, name) if self._tp_plan is not None and name else None
            if name in self._columns:
                self._state[region or ""] = "inside"
                return "n", True
            if name in self._rows:
                self._state[region or ""] = "after"
                return ("k", False) if is_product else ("", False)
            if region is not None:
                inside = self._state.get(region) == "inside"
                return ("batch", True) if inside else ("", False)
        return "", None

    def _classify_experts(self, name: str, is_product: bool) -> tuple[Dim, bool | None]:
        """Classifies an operation of stacked experts, whose first product has the hidden features that are divided."""
        if not is_product:
            return "", None
        is_first = self._state.get(name) != "inside"
        self._state[name] = "inside" if is_first else "after"
        return ("n", True) if is_first else ("k", False)

    def leave_block(self) -> None:
        """Forgets the regions that have run, before the next block."""
        self._state.clear()

    def count_parameters(
        self, model: nn.Module, blocks: list[str], experts: Collection[str] = ()
    ) -> tuple[dict[str, dict[str, Any]], DividedAmount]:
        """Returns the counts of each block, of `stem` and of `head`, by attribute, and the number of tied parameters.

        Args:
            model: Model with the dtypes that its parameters have before the run's precision changes them.
            blocks: Names of the blocks.
            experts: Names of the parameters that `ep` divides.
        """
        sums = {name: [[0.0, 0.0] for _ in _COUNTS] for name in (*blocks, "stem", "head")}
        tied = [0.0, 0.0]
        owners: dict[int, str] = {}
        known = set(blocks)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            part = self._part_of(name, known)
            at = 0 if name in self.divided else 1
            if id(parameter) in owners:
                if owners[id(parameter)] != part:
                    tied[at] += parameter.numel()
                continue
            owners[id(parameter)] = part
            every, trained, fixed, divided, trained_divided = sums[part]
            if not parameter.requires_grad and parameter.dtype != torch.get_default_dtype():
                fixed[at] += parameter.nbytes
                continue
            every[at] += parameter.numel()
            trained[at] += parameter.numel() * parameter.requires_grad
            if name in experts:
                divided[at] += parameter.numel()
                trained_divided[at] += parameter.numel() * parameter.requires_grad
        counts = {name: (DividedAmount(*amount) for amount in amounts) for name, amounts in sums.items()}
        return {name: dict(zip(_COUNTS, own, strict=True)) for name, own in counts.items()}, DividedAmount(*tied)

    def _part_of(self, name: str, blocks: set[str]) -> str:
        parent = name
        while parent:
            if parent in blocks:
                return parent
            parent = parent.rpartition(".")[0]
        owners = self._plan.owners(name) if self._plan is not None else []
        return owners[0] if owners and owners[0] != "blocks" else "head"


def _first(values: Any) -> Tensor | None:
    """Returns the first tensor of real numbers."""
    return next((x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()), None)


class ExpertProfile:
    """Mixtures of a model, and what `ep` makes of them.

    Args:
        model: Model, on any device.
        plan: Plan of the model; None divides nothing.

    Attributes:
        sizes: Sizes of the axis `ep` that divide the experts.
        names: Names of the parameters that it divides.
        parameters: Ids of these parameters.
        why_not: Reason why they cannot be divided, under the key `ep`.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan | None) -> None:
        self._model = model
        self.sizes: tuple[int, ...] = (1,)
        self.why_not: dict[str, str] = {}
        self._mixtures: list[Mixture] = []
        self._exchanged: dict[str, float] = {}
        mixtures = [] if plan is None else find_mixtures(model, plan)
        if plan is not None and mixtures:
            common = math.gcd(*(mixture.count for mixture in mixtures))
            try:
                self._mixtures = divisible_mixtures(model, plan, common)
                self.sizes = tuple(n for n in range(1, common + 1) if common % n == 0)
            except DloError as error:
                self.why_not["ep"] = str(error)
        self.names = {name for mixture in self._mixtures for name in mixture.stacked}
        self.parameters = {id(model.get_parameter(name)) for name in self.names}

    def exchanged_in(self, name: str) -> float:
        """Returns the bytes that the mixtures of a module exchange in a forward, as its last call has shown."""
        return sum(size for experts, size in self._exchanged.items() if experts.startswith(f"{name}."))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Counts the tokens of each call of the experts inside the block."""

        def count(mixture: Mixture, module: nn.Module, args: Any, kwargs: Any) -> None:
            self._exchanged[mixture.experts] = _exchanged(mixture, module, [*args, *kwargs.values()])

        with contextlib.ExitStack() as hooks:
            for mixture in self._mixtures:
                experts = self._model.get_submodule(mixture.experts)
                own = functools.partial(count, mixture)
                hooks.enter_context(experts.register_forward_pre_hook(own, with_kwargs=True))
            yield


def _exchanged(mixture: Mixture, module: nn.Module, given: list[Any]) -> float:
    """Returns the bytes of a mixture's tokens on their way to experts, and of the outputs on their way back.

    Args:
        mixture: Mixture.
        module: Module of its experts.
        given: Arguments of the call: tokens, and under `routed` the experts of each.
    """
    tokens = next(value for value in given if isinstance(value, Tensor))
    if mixture.form == "dense":  # A copy of each token for each expert, of which those of the chosen ones travel.
        choices = tokens.shape[0] / mixture.count * (mixture.top_k or mixture.count)
    else:
        choices = next(v.numel() for v in given if isinstance(v, Tensor) and not v.is_floating_point())
    size = tokens.element_size()
    # transformers adds biases in the tokens' dtype, which is single precision under autocast.
    returned = 4 if any(parameter.ndim < 3 for parameter in module.parameters(recurse=False)) else size
    return float(choices * tokens.shape[-1] * (size + returned))
