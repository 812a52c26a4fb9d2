"""Tensor rules of a task's model, inferred where its plan has none."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from dlo_framework.batches import batch_size, map_rows, tree_map
from dlo_framework.errors import DloError
from dlo_framework.experts import find_mixtures
from dlo_framework.fake_kernels import fake_copy, fake_like, fake_tensors
from dlo_framework.plan import ParallelPlan, Rule
from dlo_plugins.tensor.division import check_divisibility
from dlo_plugins.tensor.inference.block_kinds import block_kind
from dlo_plugins.tensor.inference.block_proof import BlockProof, NotProvenError
from dlo_plugins.tensor.inference.projection_flow import ProjectionFlow, is_projection, record_flow
from dlo_plugins.tensor.inference.proof_units import find_units
from dlo_plugins.tensor.inference.rule_candidates import Candidate, find_candidates
from dlo_plugins.tensor.tp_plan import TPPlan, region_of
from dlo_plugins.tensor.tp_planner import SHAPING, make_tp_plan, unsaved_buffers

_ROWS = 2
#: Tokens of a row: enough for each to see others.
_TOKENS = 16
_PROJECTING = (Rule.REPLICATE, Rule.SEQUENCE, Rule.VOCAB, *SHAPING)


@dataclass(frozen=True)
class InferredRules:
    """Rules that were inferred for a model.

    Attributes:
        tensor: Rules by pattern.
        head_widths: Widths of heads by pattern of attention modules.
        head_operands: Arguments with an entry for each head, by pattern of attention modules.
        shared_features: Numbers of last features that all heads use, by pattern of projections that stay whole.
        cut: Patterns of the row projections whose attention or MLP is cut.
        whole: Reasons why others stay whole, by pattern.
    """

    tensor: Mapping[str, Rule] = field(default_factory=dict)
    head_widths: Mapping[str, int] = field(default_factory=dict)
    head_operands: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    shared_features: Mapping[str, int] = field(default_factory=dict)
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


def with_rules(plan: ParallelPlan, found: InferredRules, model: nn.Module, tp: int) -> ParallelPlan:
    """Returns a plan with inferred rules after its own; an attention or MLP that the ranks do not divide stays whole.

    Args:
        plan: Plan of the model.
        found: Inferred rules.
        model: Model, on any device.
        tp: Number of ranks.

    Raises:
        DloError: The ranks divide none of them.
    """
    made = replace(
        plan,
        tensor={**plan.tensor, **found.tensor},
        head_widths={**plan.head_widths, **found.head_widths},
        head_operands={**plan.head_operands, **found.head_operands},
        shared_features={**plan.shared_features, **found.shared_features},
    )
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
    """Returns the rules of a task's model.

    Args:
        task: Task with its model built, on any device; it is not changed.
        plan: Plan of the model without tensor rules.
        datamodule: Datamodule that may know the shapes of a batch.

    Raises:
        DloError: No attention or MLP can be cut; the message has the layers that stand in the way.
    """
    name = type(task.model).__name__
    example = task.example_batch(datamodule)
    if example is None:
        raise DloError(
            f"a plan without tensor rules must have an example batch, to infer them from a forward, got none for"
            f" {name}; let the task's example_batch(datamodule) return a batch with any values, such as"
            ' {"input_ids": torch.zeros(1, 64, dtype=torch.long)}, or set ParallelPlan(tensor=...)'
        )
    with isolate_rng(include_cuda=False):
        units = find_units(task.model, plan)
        flow = _record(task, units, example)
        found = _infer(task.model, units, flow)
        if not found.tensor and any(_is_wide(part) for part in task.model.modules()):
            flow = _record(task, units, example, wide=True)
            found = _infer(task.model, units, flow)
    if not found.tensor:
        raise DloError(_refusal(name, flow, found))
    return found


def complete_rules(task: Any, plan: ParallelPlan, datamodule: Any = None) -> InferredRules:
    """Returns rules of attentions and MLPs that a plan with rules leaves whole; none if they cannot be divided.

    transformers' own plans of DeepSeek's families divide experts, and leave their latent attention whole.

    Args:
        task: Task with its model built, on any device; it is not changed.
        plan: Plan of the model, with rules for other projections.
        datamodule: Datamodule that may know the shapes of a batch.
    """
    example = task.example_batch(datamodule)
    if example is None:
        return InferredRules()
    with isolate_rng(include_cuda=False):
        units = find_units(task.model, plan)
        return _infer(task.model, units, _record(task, units, example))


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
    example, model = task.example_batch(datamodule), task.model
    cut = make_tp_plan(model, replace(plan, tensor={**plan.tensor, "**": Rule.SEQUENCE}), 1)
    mixtures = tuple(mixture.name for mixture in find_mixtures(model, plan))
    blocks = [name for name in plan.block_names(model) if not any(f"{one}.".startswith(f"{name}.") for one in mixtures)]
    if example is None:
        rank_zero_info(
            f"the tensor rules of {type(model).__name__} were not tried on values, since its task has no example_batch"
        )
        return None
    modules, found = [name for name, _ in model.named_modules()], InferredRules()
    with isolate_rng(include_cuda=False):
        flow = _record(task, dict.fromkeys(blocks, True), example)
        by_kind: dict[Any, list[str]] = {}
        for name in (name for name in blocks if name in flow.calls):
            by_kind.setdefault(block_kind(model.get_submodule(name)), []).append(name)
        for names in by_kind.values():
            own = _try_block(model.get_submodule(names[0]), names[0], flow, plan, cut)
            found = _merged(found, own, _patterns(names, modules))
    return found


def _try_block(block: nn.Module, name: str, flow: ProjectionFlow, plan: ParallelPlan, cut: TPPlan) -> InferredRules:
    """Returns the rules that a plan leaves to be known, with names relative to a block.

    Raises:
        DloError: The block's slices do not give its outputs or gradients.
    """
    inside = [one for one, _ in (*block.named_modules(), *block.named_parameters(), *unsaved_buffers(block)) if one]
    inside.sort(key=lambda one: -one.count("."))  # The rule of a module does not hide those inside it.
    rules = {one: rule for one in inside if (rule := plan.rule_for(f"{name}.{one}")) is not Rule.REPLICATE}
    widths = {one: width for one in inside if (width := plan.head_width_for(f"{name}.{one}"))}
    operands = {one: dims for one in inside if (dims := plan.head_operands_for(f"{name}.{one}"))}
    shared = {one: count for one in inside if (count := plan.shared_features_for(f"{name}.{one}"))}
    try:
        proof = BlockProof(block, flow.calls[name])
        proved = proof.prove(rules, widths, operands, shared)
    except NotProvenError as error:
        if "does not run" in str(error):
            return InferredRules()
        regions = [of for at, of in cut.regions.items() if f"{at}.".startswith(f"{name}.")]
        for region in regions if len(regions) > 1 else ():
            others = tuple(f"{one}." for of in regions if of is not region for one in (*of.columns, *of.rows))
            alone = {one: rule for one, rule in rules.items() if not f"{name}.{one}.".startswith(others)}
            with contextlib.suppress(DloError):
                proof.prove(alone, widths, operands, shared)
                rules = {one: rule for one, rule in rules.items() if one not in alone}
        shown = ", ".join(f"{one}: {rule}" for one, rule in rules.items() if one in dict(block.named_modules()))
        raise DloError(
            f"tensor rules must give what the full '{name}' computes, got {shown}, with which {error}; correct"
            " ParallelPlan(tensor=...)"
        ) from error
    except DloError:  # Sizes that do not fit, of which the planner tells.
        return InferredRules()
    return InferredRules({one: rule for one, rule in proved.items() if one not in rules})


def _refusal(name: str, flow: ProjectionFlow, found: InferredRules) -> str:
    reasons = [f"'{layer}': {why}" for layer, why in list(found.whole.items())[:3]]
    if flow.stopped is not None:
        line = (str(flow.stopped).strip().splitlines() or [""])[0][:160]
        reasons += [f"its forward fails on fake tensors: {type(flow.stopped).__name__}: {line}"]
    what = "; ".join(reasons) or "no linear layer of a block feeds another without the residual stream between them"
    return (
        f"a plan must have tensor rules for tensor parallelism, got none from {name}, and none can be inferred"
        f" ({what}); set tp=1, or ParallelPlan(tensor=...) with the projections' rules"
    )


def _is_wide(module: nn.Module) -> bool:
    return is_projection(module, wide=True) and not is_projection(module)


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


def _infer(model: nn.Module, units: Mapping[str, bool], flow: ProjectionFlow) -> InferredRules:
    modules = [name for name, _ in model.named_modules()]
    by_kind: dict[Any, list[str]] = {}
    for name in units:
        by_kind.setdefault(block_kind(model.get_submodule(name)), []).append(name)
    found = InferredRules()
    for names in by_kind.values():
        first = next((name for name in names if name in flow.calls), None)
        if first is None:
            continue
        block = model.get_submodule(first)
        candidates = find_candidates(block, first, flow)
        if candidates:
            own = _prove_block(block, first, flow, candidates, units[first])
            found = _merged(found, own, _patterns(names, modules))
    return found


def _prove_block(
    block: nn.Module, name: str, flow: ProjectionFlow, candidates: Sequence[Candidate], is_block: bool
) -> InferredRules:
    """Returns a block's rules, with names relative to it."""
    try:
        proof = BlockProof(block, flow.calls[name], is_block)
    except DloError as error:
        return InferredRules(whole={candidates[0].row: str(error)})
    rules: dict[str, Rule] = {}
    widths: dict[str, int] = {}
    operands: dict[str, Mapping[str, int]] = {}
    shared: dict[str, int] = {}
    cut: list[str] = []
    whole: dict[str, str] = {}
    for candidate in candidates:
        used = ParallelPlan(tensor={key: rule for key, rule in rules.items() if rule not in SHAPING})
        taken = [key for key in (candidate.row, *candidate.columns) if used.rule_for(key) not in _PROJECTING]
        if taken:
            continue
        with_width = {**widths}
        if candidate.head_width is not None:
            with_width[candidate.around] = candidate.head_width
        own = {key: rule for key, rule in rules.items() if rule is not Rule.SEQUENCE}
        reasons: list[DloError] = []
        for variant, of_heads in itertools.product(candidate.variants, candidate.operands):
            with_operands = {**operands, candidate.around: of_heads} if of_heads else operands
            try:
                rules = proof.prove({**own, **variant}, with_width, with_operands, {**shared, **candidate.shared})
            except DloError as error:
                reasons.append(error)
                continue
            widths, operands, shared, reasons = with_width, with_operands, {**shared, **candidate.shared}, []
            cut.append(candidate.row)
            break
        if reasons:
            whole[candidate.row] = _likeliest(reasons)
    whole = {row: why for row, why in whole.items() if ParallelPlan(tensor=rules).rule_for(row) is not Rule.ROW}
    return InferredRules(rules, widths, operands, shared, tuple(cut), whole)


def _likeliest(reasons: Sequence[DloError]) -> str:
    """Returns the reason of the variant that came furthest: values that differ, slices that do not run, rules."""
    later = reversed(reasons)  # Of the same kind, that of the variant for more kinds of code.
    return str(min(later, key=lambda why: (not isinstance(why, NotProvenError), "does not run" in str(why))))


def _patterns(names: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Returns patterns of the blocks of one kind: with `*` where all modules that it matches are of this kind."""
    found: dict[str, None] = {}
    for name in names:
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
        matched = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        is_whole = all(other in names for other in modules if matched.fullmatch(other))
        found[pattern if is_whole else name] = None
    return list(found)


def _merged(found: InferredRules, own: InferredRules, patterns: Sequence[str]) -> InferredRules:
    def named(values: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{at}.{key}" if key else at: value for at in patterns for key, value in values.items()}

    tensor = {**found.tensor, **named(own.tensor)}
    tensor = dict(sorted(tensor.items(), key=lambda item: item[1] in SHAPING))
    return InferredRules(
        tensor,
        {**found.head_widths, **named(own.head_widths)},
        {**found.head_operands, **named(own.head_operands)},
        {**found.shared_features, **named(own.shared_features)},
        (*found.cut, *(f"{at}.{key}" for at in patterns for key in own.cut)),
        {**found.whole, **named(own.whole)},
    )
