"""Makes the tensor-parallel plan of a model from its parallel plan, before parameters are sharded.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.models.four_bit_linear import FourBitLinear
from dlo_framework.plan import ParallelPlan, Rule, tied_groups
from dlo_plugins.parallel.tensor.expert_slices import divide_stacked_experts
from dlo_plugins.parallel.tensor.heads import head_width, kv_heads
from dlo_plugins.parallel.tensor.projections import (
    adapter_kinds,
    base_name,
    base_of,
    channel_count,
    check_row,
    divide_adapters,
    is_channelwise,
    output_names,
    projection_kind,
    weight_names,
)
from dlo_plugins.parallel.tensor.tp_plan import (
    RegionPlan,
    TPPlan,
    check_divisibility,
    region_of,
)

_COLUMNS = (
    *(Rule.COLUMN, Rule.QKV, Rule.QKV_BY_HEAD, Rule.QKV_GROUPED, Rule.QKV_BY_GROUP),
    *(Rule.GATE_UP, Rule.HEADS, Rule.KV_HEADS),
)
#: Rules of a region's module: how its code reshapes.
SHAPING = (Rule.LOCAL_SHAPES, Rule.LOCAL_COUNTS)
#: Rules that a parameter cannot have by its own name.
_OF_PROJECTIONS = (Rule.ROW, Rule.VOCAB, Rule.QKV, Rule.QKV_GROUPED, Rule.QKV_BY_GROUP, Rule.GATE_UP)
_CUTTING = (*_COLUMNS, Rule.ROW, Rule.VOCAB, Rule.COLUMN_NORM, Rule.PER_CHANNEL, Rule.LAST_DIM_HEADS)


def make_tp_plan(module: nn.Module, plan: ParallelPlan, tp: int, sequence_parallel: bool = False) -> TPPlan:
    """Returns the tensor-parallel plan of a model.

    Args:
        module: Model, on any device; the meta device will do.
        plan: Parallel plan of the model.
        tp: Number of ranks.
        sequence_parallel: Whether to split activations between regions along the sequence.

    Raises:
        DloError: If the plan has no tensor rules, a module cannot be sharded, or a size is not divisible by the ranks.
    """
    tp_plan, ruled = TPPlan(), dict[str, Rule]()
    modules = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    for name in modules:  # The outermost modules that sharding rules match.
        rule = plan.rule_for(name)
        if rule in _CUTTING and not any(name.startswith(f"{other}.") for other in ruled):
            ruled[name] = rule
    if not ruled:
        got = f"{', '.join(plan.tensor)}, which match no module," if plan.tensor else "none"
        raise DloError(
            f"a plan must have tensor rules for tensor parallelism, got {got} from {type(module).__name__}; set tp=1,"
            " or ParallelPlan(tensor=...) with the projections' rules"
        )
    _find_regions(tp_plan, ruled)
    for name, region in tp_plan.regions.items():
        region.local_shapes = plan.rule_for(name) in SHAPING
        region.local_counts = plan.rule_for(name) is not Rule.LOCAL_SHAPES
        region.width = plan.head_width_for(name) or 0
        region.operands = dict(plan.head_operands_for(name))
    # Query heads first: a module may have an attribute for their number, and none for their width.
    for name, rule in sorted(ruled.items(), key=lambda item: item[1] is Rule.KV_HEADS):
        divide = _DIVIDE.get(rule)
        if divide is None:
            _divide_projection(tp_plan, modules, name, rule)
        else:
            divide(tp_plan, name, modules[name])
    _share_features(tp_plan, modules, plan, ruled)
    _divide_parameters(tp_plan, module, plan)
    divide_stacked_experts(tp_plan, module, plan)
    for names in tied_groups(module):
        divisions = {tp_plan.divisions.get(name) for name in names}
        if len(divisions) > 1:
            raise DloError(
                f"tied parameters must have the same rule, got different ones for {list(names)}; set one rule"
            )
    check_divisibility(tp_plan.divisibilities, tp)
    for name, size in tp_plan.vocabulary.items():
        if size < tp:
            raise DloError(
                f"tp must be at most the {size} tokens of '{name}', so that each rank has one, got {tp}; set tp={size}"
            )
    if not tp_plan.regions:
        raise DloError(
            f"tensor parallelism must shard layers, got a plan of {type(module).__name__} whose rules match only its"
            f" vocabulary ({', '.join(ruled)}); set tp=1, or ParallelPlan(tensor=...) with the projections' rules"
        )
    _find_partial(tp_plan, module, plan)
    if sequence_parallel:
        _split_sequence(tp_plan, module, plan)
    return tp_plan


def _find_regions(tp_plan: TPPlan, ruled: dict[str, Rule]) -> None:
    columns = [name for name, rule in ruled.items() if rule in _COLUMNS]
    for row in (name for name, rule in ruled.items() if rule is Rule.ROW):
        around = row
        while around:
            around = around.rpartition(".")[0]
            if any(column.startswith(f"{around}." if around else "") for column in columns):
                break
        else:
            raise DloError(
                f"row projection '{row}' must have a column projection in a module around it, got none; add the rule"
                " 'column' for the projection before it"
            )
        tp_plan.regions.setdefault(around, RegionPlan()).rows.append(row)
    for column in columns:
        region = region_of(tp_plan, column)
        if region is None:
            raise DloError(
                f"column projection '{column}' must have a row projection after it, got none; add the rule 'row' for"
                " the projection that follows it"
            )
        tp_plan.regions[region].columns.append(column)


def _divide_projection(tp_plan: TPPlan, modules: dict[str, nn.Module], name: str, rule: Rule) -> None:
    part = modules[name]
    base, inner, adapters = base_of(part), base_name(name, part), adapter_kinds(name, part)
    kind = projection_kind(name, base)
    _check_plain(name, base, rule)
    inputs, size = getattr(base, kind.inputs), getattr(base, kind.outputs)
    if rule is Rule.ROW:
        check_row(name, base)
        for key in weight_names(base):
            tp_plan.divide(f"{inner}.{key}", kind.in_dim, base.get_parameter(key).shape[kind.in_dim])
        divide_adapters(tp_plan, name, adapters, (inputs,), row=True)
        tp_plan.demand(name, inputs, "input features")
        if isinstance(base, FourBitLinear):
            tp_plan.demand(name, inputs // base.block, f"blocks of {base.block} input features")
        return
    region_name = region_of(tp_plan, name)
    assert region_name is not None
    region = tp_plan.regions[region_name]
    region.inputs.add(inputs)
    region.outputs.add(size)
    pieces = _pieces(tp_plan, modules, name, rule, size, region_name)
    if name in region.shared:
        return
    for key in output_names(base):
        tp_plan.divide(f"{inner}.{key}", kind.out_dim, *pieces)
    if base.bias is not None:
        tp_plan.divide(f"{inner}.bias", 0, *pieces)
    divide_adapters(tp_plan, name, adapters, pieces, row=False)


def _pieces(
    tp_plan: TPPlan, modules: dict[str, nn.Module], name: str, rule: Rule, size: int, region_name: str
) -> tuple[int, ...]:
    """Returns the consecutive slices of a column projection's output, and records the counts that ranks divide."""
    region = tp_plan.regions[region_name]
    if rule in (Rule.COLUMN, Rule.GATE_UP):
        halves = 1 if rule is Rule.COLUMN else 2
        tp_plan.demand(name, size // halves, "output features")
        return (size // halves,) * halves
    asked = [modules[parent] for parent in (name.rpartition(".")[0], region_name) if parent in modules]
    of_queries = size // 3 if rule in (Rule.QKV, Rule.QKV_BY_HEAD) else size
    region.width = region.width or head_width(name, asked, of_queries)
    width = region.width
    if rule is Rule.KV_HEADS:
        region.kv = size // width
        if region.kv == 1:
            region.shared.append(name)
        else:
            tp_plan.demand(region_name, region.kv, "key/value heads")
        return (size,)
    if rule in (Rule.QKV_GROUPED, Rule.QKV_BY_GROUP):
        region.kv, region.counts_by_config = kv_heads(name, asked, _row_heads(modules, region), size // width), True
        region.heads = size // width - 2 * region.kv
        tp_plan.demand(region_name, region.heads, "heads")
        parts = (region.heads * width, region.kv * width, region.kv * width)
        if region.kv == 1:  # Both rules have the same order.
            tp_plan.demand(name, width, "features of its one key/value head")
            region.gathered[name] = 2 * width
            return parts
        tp_plan.demand(region_name, region.kv, "key/value heads")
        return parts if rule is Rule.QKV_GROUPED else (size,)
    region.heads = of_queries // width
    tp_plan.demand(region_name, region.heads, "heads")
    return (of_queries,) * 3 if rule is Rule.QKV else (size,)


def _share_features(tp_plan: TPPlan, modules: dict[str, nn.Module], plan: ParallelPlan, ruled: dict[str, Rule]) -> None:
    """Notes the projections that each rank computes in full, some of whose features all heads use."""
    for name, part in modules.items() if plan.shared_features else ():
        count = plan.shared_features_for(name)
        if not count:
            continue
        base: Any = base_of(part)
        outputs = getattr(base, projection_kind(name, base).outputs)
        region = region_of(tp_plan, name)
        if region is None:  # An attention that stays whole.
            continue
        if name in ruled or not 0 < count < outputs:
            rule = f" and the rule {ruled[name]}" if name in ruled else ""
            raise DloError(
                f"shared_features must be fewer than the {outputs} output features of '{name}', which each rank"
                f" computes in full, got {count}{rule}; correct it in ParallelPlan(shared_features=...)"
            )
        tp_plan.regions[region].shared_features[name] = count


def _row_heads(modules: dict[str, nn.Module], region: RegionPlan) -> int:
    """Returns the number of heads that a region's row projection gets; 0 if it is not of whole heads."""
    base: Any = base_of(modules[region.rows[0]])
    inputs = int(getattr(base, projection_kind(region.rows[0], base).inputs))
    return inputs // region.width if inputs % region.width == 0 else 0


def _divide_vocabulary(tp_plan: TPPlan, name: str, part: nn.Module) -> None:
    base, inner = base_of(part), base_name(name, part)
    if not isinstance(base, nn.Embedding | nn.Linear):
        raise DloError(
            f"module '{name}' with the rule 'vocab' must be an Embedding or a Linear, got {type(part).__name__}; remove"
            " it from the plan's tensor rules"
        )
    _check_plain(name, base, Rule.VOCAB)
    size = tp_plan.vocabulary[name] = base.weight.shape[0]
    for key, _ in base.named_parameters(recurse=False):
        tp_plan.divide(f"{inner}.{key}", 0, size)
    divide_adapters(tp_plan, name, adapter_kinds(name, part), (size,), row=False)


def _check_plain(name: str, part: nn.Module, rule: Rule) -> None:
    """Checks that a module's weights are parameters, and not computed from others."""
    computed = next((key for key in weight_names(part) if key not in part._parameters), None)
    if computed is not None:
        raise DloError(
            f"module '{name}' with the rule '{rule}' must have a {computed} of its own, got one that a parametrization,"
            " a weight norm or pruning computes; remove it from the plan's tensor rules"
        )


def _divide_norm(tp_plan: TPPlan, name: str, part: nn.Module) -> None:
    region = region_of(tp_plan, name)
    parameters = dict(part.named_parameters(recurse=False))
    if region is None or not type(part).__name__.endswith("RMSNorm") or list(parameters) != ["weight"]:
        raise DloError(
            f"module '{name}' with the rule 'column_norm' must be an RMS norm with a weight between sharded"
            f" projections, got {type(part).__name__}; remove the projections around it from the plan's tensor rules"
        )
    size = parameters["weight"].shape[0]
    tp_plan.regions[region].norms.append(name)
    tp_plan.divide(f"{name}.weight", 0, size)
    tp_plan.demand(name, size, "features")


def _divide_channels(tp_plan: TPPlan, name: str, part: nn.Module) -> None:
    """Divides the parameters and running statistics of a module that computes with groups of channels alone."""
    region = region_of(tp_plan, name)
    if region is None or not is_channelwise(part):
        raise DloError(
            f"module '{name}' with the rule 'per_channel' must be a batch norm, or a convolution of several groups,"
            f" between sharded projections, got {type(part).__name__}; remove it from the plan's tensor rules"
        )
    tp_plan.regions[region].channelwise.append(name)
    for key, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
        if tensor.ndim:
            tp_plan.divide(f"{name}.{key}", 0, tensor.shape[0])
    tp_plan.demand(name, channel_count(part), "channels, or groups of them")


#: Functions that divide other modules than projections, by their rule.
_DIVIDE = {Rule.VOCAB: _divide_vocabulary, Rule.COLUMN_NORM: _divide_norm, Rule.PER_CHANNEL: _divide_channels}


def _divide_parameters(tp_plan: TPPlan, module: nn.Module, plan: ParallelPlan) -> None:
    """Divides the parameters that a rule matches by their own name, and buffers that are not saved."""
    for name, parameter in (*module.named_parameters(remove_duplicate=False), *unsaved_buffers(module)):
        rule = plan.rule_for(name)
        owner = name.rpartition(".")[0]
        if rule not in _CUTTING or name in tp_plan.divisions or plan.rule_for(owner) is rule:
            continue
        region = region_of(tp_plan, name)
        if region is None or rule in _OF_PROJECTIONS:
            raise DloError(
                f"rule '{rule}' must match a projection inside a region, got the parameter '{name}'; remove the rule"
            )
        dim = parameter.ndim - 1 if rule is Rule.LAST_DIM_HEADS else 0
        tp_plan.divide(name, dim, parameter.shape[dim])
        tp_plan.demand(name, parameter.shape[dim], "entries")


def unsaved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that are not saved, by name."""
    for name, part in module.named_modules():
        for key in part._non_persistent_buffers_set:
            buffer = part._buffers.get(key)
            if buffer is not None:
                yield f"{name}.{key}" if name else key, buffer


def _find_partial(tp_plan: TPPlan, module: nn.Module, plan: ParallelPlan) -> None:
    """Finds the replicated parameters of regions, whose gradient is a partial sum on each rank.

    Raises:
        DloError: If a parameter needs all features at once, or the plan has no rule for a parameter that needs one.
    """
    blocks = set(plan.block_names(module))
    owners = dict(module.named_modules(remove_duplicate=False))
    rows = {f"{base_name(row, owners[row])}.bias" for region in tp_plan.regions.values() for row in region.rows}
    shared = tuple(f"{name}." for region in tp_plan.regions.values() for name in region.shared)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        around = region_of(tp_plan, name)
        done = name in tp_plan.divisions or name in rows or name in tp_plan.partial
        if around is None or done or plan.rule_for(name) is Rule.SEQUENCE:
            continue
        if name.startswith(shared):
            tp_plan.partial.add(name)
            continue
        weight, region = getattr(owners[name.rpartition(".")[0]], "weight", None), tp_plan.regions[around]
        shape = tuple(weight.shape if isinstance(weight, nn.Parameter) else parameter.shape)
        if shape and shape[-1] in region.inputs - region.outputs - {region.width}:
            continue  # It works on full activations, before the column projections or after the row projections.
        if around in blocks or around == "" or any(block.startswith(f"{around}.") for block in blocks):
            if plan.has_rule_for(name):  # The rule `replicate`.
                continue
            raise DloError(
                f"parameter '{name}' must have a rule, as '{around}' contains it and sharded projections, got none; set"
                " the rule 'sequence' if it works on full activations, or move the projections into a module of their"
                " own"
            )
        is_square = len(shape) > 1 and shape[0] in region.outputs and shape[1] in region.inputs
        if is_square or (len(shape) == 1 and shape[0] in region.inputs | region.outputs):
            raise DloError(
                f"parameter '{name}' must not span all features of '{around}', which are sharded, got shape"
                f" {tuple(parameter.shape)}; set tp=1, remove the module's projections from the plan's tensor rules, or"
                " set the rule 'sequence' if it works on the module's input"
            )
        tp_plan.partial.add(name)


def _split_sequence(tp_plan: TPPlan, module: nn.Module, plan: ParallelPlan) -> None:
    """Checks that a model's activations can be split along the sequence between regions.

    The replicated parameters of blocks become partial, as each rank has only some tokens.

    Raises:
        DloError: If they cannot, or the plan has no rule 'sequence' for a parameter.
    """
    modules, blocks = dict(module.named_modules()), dict.fromkeys(plan.block_names(module))
    for around, region in tp_plan.regions.items():
        if any(isinstance(base_of(modules[row]), nn.Conv2d) for row in region.rows):
            raise DloError(
                "sequence_parallel must have activations [batch, sequence, width], got feature maps in"
                f" '{around}'; set sequence_parallel: false"
            )
        if around in blocks or len(region.rows) > 1:
            raise DloError(
                "sequence_parallel must have sharded projections in modules of their own, where it gathers the"
                f" sequence, got them directly in '{around}'; move them into modules, or set sequence_parallel: false"
            )
    for block in blocks:
        for name, _ in modules[block].named_parameters(remove_duplicate=False):
            full = f"{block}.{name}"
            if region_of(tp_plan, full) is None and plan.rule_for(full) is not Rule.SEQUENCE:
                raise DloError(
                    f"parameter '{full}' must have the rule 'sequence' for sequence_parallel, which splits its"
                    " activations along the sequence, got none; set the rule if it treats each token separately, or"
                    " set sequence_parallel: false"
                )
            if full not in tp_plan.divisions:
                tp_plan.partial.add(full)
