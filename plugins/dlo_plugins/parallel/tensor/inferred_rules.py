"""Tensor rules of a task's model, inferred where its plan has none.

They are inferred unit by unit. A block is one unit, since its projections may be in its own code. Where blocks have
stacked experts, which are divided without rules, or projections with rules of the family, the units are their outermost
modules without them: a proof of an attention needs neither the values of hundreds of experts nor those of an MLP.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from dlo_framework.batches import batch_size, map_rows, tree_map
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import fake_copy, fake_like, fake_tensors
from dlo_framework.models.experts import find_mixtures
from dlo_framework.plan import ParallelPlan, Rule
from dlo_framework.task import find_example
from dlo_plugins.parallel.tensor.block_proof import (
    BlockProof,
    NotProvenError,
    error_line,
    join_plans,
    rename_plan,
)
from dlo_plugins.parallel.tensor.projections import base_of
from dlo_plugins.parallel.tensor.rule_candidates import (
    ProjectionFlow,
    block_kind,
    find_candidates,
    is_projection,
    record_flow,
)
from dlo_plugins.parallel.tensor.tp_plan import TPPlan, check_divisibility, region_of
from dlo_plugins.parallel.tensor.tp_planner import SHAPING, make_tp_plan, unsaved_buffers

_ROWS = 2
#: Tokens of a row: enough for each to see others.
_TOKENS = 16
_PROJECTING = (Rule.REPLICATE, Rule.SEQUENCE, Rule.VOCAB, *SHAPING)


@dataclass(frozen=True)
class InferredRules:
    """Rules that were inferred for a model.

    Attributes:
        plan: Plan with the rules, the widths of heads, the operands with an entry for each head, and the numbers of
            features that all heads use, by pattern.
        cut: Patterns of the row projections whose attention or MLP is cut.
        whole: Reasons why others stay whole, by pattern.
    """

    plan: ParallelPlan = field(default_factory=ParallelPlan)
    cut: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> list[str]:
        """Returns lines for a person: what is cut, and what stays whole and why."""
        if not self.cut and not self.whole:
            return []
        lines = [f"tensor rules inferred and proved: {', '.join(self.cut) or 'none'}"]
        return lines + [f"  whole: {name}: {why}" for name, why in self.whole.items()]


def has_rules(plan: ParallelPlan) -> bool:
    """Returns whether a plan has rules for projections."""
    return any(rule not in _PROJECTING for rule in plan.tensor.values())


def with_rules(plan: ParallelPlan, inferred: InferredRules, model: nn.Module, tp: int) -> ParallelPlan:
    """Returns a plan with inferred rules after its own; an attention or MLP that the ranks do not divide stays whole.

    Args:
        plan: Plan of the model.
        inferred: Inferred rules.
        model: Model, on any device.
        tp: Number of ranks.

    Raises:
        DloError: The ranks divide none of them.
    """
    made = join_plans(plan, inferred.plan)
    cut = make_tp_plan(model, made, 1)
    undivided = {region_of(cut, demand.owner) for demand in cut.divisibilities if demand.count % tp}
    if not undivided:
        return made
    if undivided >= cut.regions.keys():
        check_divisibility(cut.divisibilities, tp)
    blocks, names = plan.block_names(model), list[str]()
    for name in (name for name in undivided if name is not None):
        if name not in blocks:
            names.append(name)
            continue
        region = cut.regions[name]  # Another region may be inside the block.
        names += [*region.columns, *region.rows, *region.norms, *region.channelwise]
        names += [parameter for parameter in cut.divisions if region_of(cut, parameter) == name]
    whole = dict.fromkeys(names, Rule.SEQUENCE)
    return replace(made, tensor={**whole, **made.tensor, **whole})


def infer_rules(task: Any, plan: ParallelPlan, datamodule: Any = None) -> InferredRules:
    """Returns rules of the attentions and MLPs that a plan leaves whole.

    A plan may have rules for other projections: transformers' own plans of DeepSeek's families divide experts, and
    leave their latent attention whole. If it has, there may be no more to divide.

    Args:
        task: Task with its model built, on any device; it is not changed.
        plan: Plan of the model.
        datamodule: Datamodule that may know the shapes of a batch.

    Raises:
        DloError: The plan has no rules, and no attention or MLP can be cut; the message has the layers that stand in
            the way.
    """
    name, completes, example = type(task.model).__name__, has_rules(plan), find_example(task, datamodule)
    if example is None and completes:
        return InferredRules()
    if example is None:
        raise DloError(
            f"a plan without tensor rules must have an example batch, to infer them from a forward, got none for"
            f" {name}; let the task's example_batch(datamodule) return a batch with any values, such as"
            ' {"input_ids": torch.zeros(1, 64, dtype=torch.long)}, or set ParallelPlan(tensor=...)'
        )
    inferred = InferredRules()
    with isolate_rng(include_cuda=False):
        units = find_units(task.model, plan)
        for wide in (False,) if completes else (False, True):
            if wide and not any(is_projection(part, wide) and not is_projection(part) for part in task.model.modules()):
                break
            flow = _record(task, units, example, wide)
            prove = functools.partial(_prove_block, task.model, units, flow)
            inferred = _infer_kinds(task.model, units, flow, prove)
            if inferred.plan.tensor:
                break
    if completes or inferred.plan.tensor:
        return inferred
    reasons = [f"'{layer}': {why}" for layer, why in list(inferred.whole.items())[:3]]
    if flow.stopped is not None:
        reasons += [f"its forward fails on fake tensors: {error_line(flow.stopped)}"]
    what = "; ".join(reasons) or "no linear layer of a block feeds another without the residual stream between them"
    raise DloError(
        f"a plan must have tensor rules for tensor parallelism, got none from {name}, and none can be inferred"
        f" ({what}); set tp=1, or ParallelPlan(tensor=...) with the projections' rules"
    )


def try_rules(task: Any, plan: ParallelPlan, datamodule: Any = None) -> InferredRules | None:
    """Tries a user's rules on values, block by block; returns those that they leave to be known of other parameters.

    A block is not tried if it has mixtures of experts, or does not run on random values.

    Args:
        task: Task with its model built, on any device; it is not changed.
        plan: Plan of the model, with rules for projections.
        datamodule: Datamodule that may know the shapes of a batch; without an example batch, None is
            returned and nothing tried.

    Raises:
        DloError: The slices of a block do not give the full block's outputs or gradients.
    """
    example, model = find_example(task, datamodule), task.model
    cut = make_tp_plan(model, replace(plan, tensor={**plan.tensor, "**": Rule.SEQUENCE}), 1)
    mixtures = tuple(mixture.name for mixture in find_mixtures(model, plan))
    blocks = [name for name in plan.block_names(model) if not any(f"{one}.".startswith(f"{name}.") for one in mixtures)]
    if example is None:
        rank_zero_info(
            f"the tensor rules of {type(model).__name__} were not tried on values, since its task has no example_batch"
        )
        return None
    with isolate_rng(include_cuda=False):
        flow = _record(task, dict.fromkeys(blocks, True), example)
        return _infer_kinds(model, blocks, flow, functools.partial(_try_block, model, plan, cut, flow))


def _try_block(model: nn.Module, plan: ParallelPlan, cut: TPPlan, flow: ProjectionFlow, name: str) -> InferredRules:
    """Returns the rules that a plan leaves to be known, with names relative to a block.

    Raises:
        DloError: The block's slices do not give its outputs or gradients.
    """
    block = model.get_submodule(name)
    inside = [one for one, _ in (*block.named_modules(), *block.named_parameters(), *unsaved_buffers(block)) if one]
    inside.sort(key=lambda one: -one.count("."))  # The rule of a module does not hide those inside it.
    rules = {one: rule for one in inside if (rule := plan.rule_for(f"{name}.{one}")) is not Rule.REPLICATE}
    tried = ParallelPlan(
        tensor=rules,
        head_widths={one: width for one in inside if (width := plan.head_width_for(f"{name}.{one}"))},
        head_operands={one: dims for one in inside if (dims := plan.head_operands_for(f"{name}.{one}"))},
        shared_features={one: count for one in inside if (count := plan.shared_features_for(f"{name}.{one}"))},
    )
    try:
        proof = BlockProof(block, flow.calls[name])
        proved = proof.prove(tried)
    except NotProvenError as error:
        if "does not run" in str(error):
            return InferredRules()
        regions = [of for at, of in cut.regions.items() if f"{at}.".startswith(f"{name}.")]
        for region in regions if len(regions) > 1 else ():
            others = tuple(f"{one}." for of in regions if of is not region for one in (*of.columns, *of.rows))
            alone = {one: rule for one, rule in rules.items() if not f"{name}.{one}.".startswith(others)}
            with contextlib.suppress(DloError):
                proof.prove(replace(tried, tensor=alone))
                rules = {one: rule for one, rule in rules.items() if one not in alone}
        shown = ", ".join(f"{one}: {rule}" for one, rule in rules.items() if one in dict(block.named_modules()))
        raise DloError(
            f"tensor rules must give what the full '{name}' computes, got {shown}, with which {error}; correct"
            " ParallelPlan(tensor=...)"
        ) from error
    except DloError:  # Sizes that do not fit, of which the planner tells.
        return InferredRules()
    return InferredRules(ParallelPlan(tensor={one: rule for one, rule in proved.items() if one not in rules}))


def _record(task: Any, units: Mapping[str, bool], example: Any, wide: bool = False) -> ProjectionFlow:
    with fake_tensors():
        own: Any = fake_copy(task).eval()
        batch = tree_map(fake_like, _small(example))

        def forward() -> None:
            args, kwargs = own.inputs(batch)
            own.forward(*args, **kwargs)

        return record_flow(own.model, [*units], forward, wide)


def _small(example: Any) -> Any:
    """Returns an example batch of few rows, and of few tokens where all its tensors are rows of tokens."""

    def repeat(values: Any) -> Any:
        if not isinstance(values, Tensor):
            return values
        values = values[:1].expand(_ROWS, *values.shape[1:])
        is_tokens = values.ndim == 2 and not values.is_floating_point()
        return values[:, :_TOKENS] if is_tokens else values

    return map_rows(repeat, example, batch_size(example))


def _infer_kinds(
    model: nn.Module, names: Iterable[str], flow: ProjectionFlow, infer: Callable[[str], InferredRules]
) -> InferredRules:
    """Returns what a function infers of the first block of each kind that ran, for all blocks of the kind.

    Args:
        model: Model.
        names: Names of blocks.
        flow: Flow between its projections.
        infer: Function of a block's name, with names relative to the block in its result.
    """
    modules, by_kind, inferred = [name for name, _ in model.named_modules()], dict[Any, list[str]](), InferredRules()
    for name in names:
        by_kind.setdefault(block_kind(model.get_submodule(name)), []).append(name)
    for same in by_kind.values():
        first = next((name for name in same if name in flow.calls), None)
        if first is None:
            continue
        own, patterns = infer(first), _patterns(same, modules)
        plan = join_plans(inferred.plan, rename_plan(own.plan, patterns))
        tensor = dict(sorted(plan.tensor.items(), key=lambda item: item[1] in SHAPING))
        cut = (*inferred.cut, *(f"{at}.{key}" for at in patterns for key in own.cut))
        whole = {f"{at}.{key}": why for at in patterns for key, why in own.whole.items()}
        inferred = InferredRules(replace(plan, tensor=tensor), cut, {**inferred.whole, **whole})
    return inferred


def _prove_block(model: nn.Module, units: Mapping[str, bool], flow: ProjectionFlow, name: str) -> InferredRules:
    """Returns a block's rules, with names relative to it."""
    block = model.get_submodule(name)
    candidates = find_candidates(block, name, flow)
    if not candidates:
        return InferredRules()
    try:
        proof = BlockProof(block, flow.calls[name], units[name])
    except DloError as error:
        return InferredRules(whole={candidates[0].row: str(error)})
    proved, cut, whole = ParallelPlan(), list[str](), dict[str, str]()
    for candidate in candidates:
        used = ParallelPlan(tensor={key: rule for key, rule in proved.tensor.items() if rule not in SHAPING})
        if any(used.rule_for(key) not in _PROJECTING for key in (candidate.row, *candidate.columns)):
            continue
        own = replace(proved, tensor={key: rule for key, rule in proved.tensor.items() if rule is not Rule.SEQUENCE})
        widths = {} if candidate.head_width is None else {candidate.around: candidate.head_width}
        reasons: list[DloError] = []
        for variant, of_heads in itertools.product(candidate.variants, candidate.operands):
            operands = {candidate.around: of_heads} if of_heads else {}
            more = ParallelPlan(
                tensor=variant, head_widths=widths, head_operands=operands, shared_features=candidate.shared
            )
            tried = join_plans(own, more)
            try:
                proved = replace(tried, tensor=proof.prove(tried))
            except DloError as error:
                reasons.append(error)
                continue
            cut.append(candidate.row)
            break
        else:
            whole[candidate.row] = _likeliest(reasons)
    whole = {row: why for row, why in whole.items() if proved.rule_for(row) is not Rule.ROW}
    return InferredRules(proved, tuple(cut), whole)


def _likeliest(reasons: Sequence[DloError]) -> str:
    """Returns the reason of the variant that came furthest: values that differ, slices that do not run, rules."""
    later = reversed(reasons)  # Of the same kind, that of the variant for more kinds of code.
    return str(min(later, key=lambda why: (not isinstance(why, NotProvenError), "does not run" in str(why))))


def _patterns(names: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Returns patterns of the blocks of one kind: with `*` where all modules that it matches are of this kind."""
    patterns: dict[str, None] = {}
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
        matched = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        is_whole = all(other in names for other in modules if matched.fullmatch(other))
        patterns[pattern if is_whole else name] = None
    return list(patterns)


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
    units: dict[str, bool] = {}
    for block in blocks:
        children = [f"{block}.{name}" for name, _ in modules[block].named_children()]
        own = _outermost(children, modules, is_done)
        if own or plan.tensor:
            units |= dict.fromkeys(own, False)
        else:  # Projections in the block's own code, beside its experts.
            units[block] = True
    return units


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
    outermost: list[str] = []
    for name in names:
        if is_done.get(name):
            continue
        within = [other for other in is_done if other.startswith(f"{name}.")]
        if not isinstance(modules[name], _CONTAINERS) and not any(is_done[other] for other in within):
            outermost += [name] if len(within) > 1 else []
            continue
        children = [f"{name}.{child}" for child, _ in modules[name].named_children()]
        outermost += _outermost(children, modules, is_done)
    return outermost
