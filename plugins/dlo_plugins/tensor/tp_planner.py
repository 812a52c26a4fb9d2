"""Tensor-parallel plan of a model, made from its parallel plan before parameters are sharded.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.four_bit_linear import FourBitLinear
from dlo_framework.plan import ParallelPlan, Rule
from dlo_plugins.tensor.adapted_projections import base_name, base_of, check_adapted, divide_adapters
from dlo_plugins.tensor.channelwise import channel_count, is_channelwise
from dlo_plugins.tensor.division import Divisibility, Division, check_divisibility
from dlo_plugins.tensor.expert_slices import divide_stacked_experts
from dlo_plugins.tensor.heads import head_width, kv_heads
from dlo_plugins.tensor.projections import output_names, projection_kind, weight_names
from dlo_plugins.tensor.replicated import add_sequence_partial, check_sequence, find_partial
from dlo_plugins.tensor.tp_plan import RegionPlan, TPPlan, region_of, vocabulary_size

_COLUMNS = (
    *(Rule.COLUMN, Rule.QKV, Rule.QKV_BY_HEAD, Rule.QKV_GROUPED, Rule.QKV_BY_GROUP),
    *(Rule.GATE_UP, Rule.HEADS, Rule.KV_HEADS),
)
#: Rules of a region's module: how its code reshapes.
SHAPING = (Rule.LOCAL_SHAPES, Rule.LOCAL_COUNTS)
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
    found = TPPlan()
    modules = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    ruled = _ruled(plan, modules)
    if not any(rule in _CUTTING for rule in ruled.values()):
        raise DloError(
            f"a plan must have tensor rules for tensor parallelism, got none from {type(module).__name__}; set tp=1, or"
            " ParallelPlan(tensor=...) with the projections' rules"
        )
    _find_regions(found, modules, ruled)
    for name, region in found.regions.items():
        region.local_shapes = plan.rule_for(name) in SHAPING
        region.local_counts = plan.rule_for(name) is not Rule.LOCAL_SHAPES
        region.width = plan.head_width_for(name) or 0
        region.operands = dict(plan.head_operands_for(name))
    # Query heads first: a module may have an attribute for their number, and none for their width.
    for name, rule in sorted(ruled.items(), key=lambda item: item[1] is Rule.KV_HEADS):
        _divide_module(found, modules, name, rule)
    _share_features(found, modules, plan, ruled)
    _divide_parameters(found, module, plan)
    divide_stacked_experts(found, module, plan)
    _share_among_tied(found, module)
    check_divisibility(found.divisibilities, tp)
    _check_vocabulary(found, tp)
    if not found.regions:
        raise DloError(
            f"tensor parallelism must shard layers, got a plan of {type(module).__name__} whose rules match only its"
            f" vocabulary ({', '.join(ruled)}); set tp=1, or ParallelPlan(tensor=...) with the projections' rules"
        )
    find_partial(found, module, plan)
    if sequence_parallel:
        check_sequence(found, module, plan)
        add_sequence_partial(found, module, plan)
    return found


def _ruled(plan: ParallelPlan, modules: dict[str, nn.Module]) -> dict[str, Rule]:
    """Returns the outermost modules that sharding rules match, by name."""
    ruled: dict[str, Rule] = {}
    for name in modules:
        rule = plan.rule_for(name)
        if rule in _CUTTING and not any(name.startswith(other + ".") for other in ruled):
            ruled[name] = rule
    return ruled


def _find_regions(found: TPPlan, modules: dict[str, nn.Module], ruled: dict[str, Rule]) -> None:
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
        found.regions.setdefault(around, RegionPlan()).rows.append(row)
    for column in columns:
        region = region_of(found, column)
        if region is None:
            raise DloError(
                f"column projection '{column}' must have a row projection after it, got none; add the rule 'row' for"
                " the projection that follows it"
            )
        found.regions[region].columns.append(column)


def _divide_module(found: TPPlan, modules: dict[str, nn.Module], name: str, rule: Rule) -> None:
    part = modules[name]
    if rule is Rule.VOCAB:
        _divide_vocabulary(found, name, part)
        return
    if rule is Rule.COLUMN_NORM:
        _divide_norm(found, name, part)
        return
    if rule is Rule.PER_CHANNEL:
        _divide_channels(found, name, part)
        return
    check_adapted(name, part)
    base, inner = base_of(part), base_name(name, part)
    kind = projection_kind(name, base)
    _check_plain(name, base, rule)
    inputs, size = getattr(base, kind.inputs), getattr(base, kind.outputs)
    if rule is Rule.ROW:
        for key in weight_names(base):
            found.divisions[f"{inner}.{key}"] = Division(kind.in_dim, (base.get_parameter(key).shape[kind.in_dim],))
        _divide_adapters(found, name, part, (inputs,), row=True)
        found.divisibilities.append(Divisibility(name, inputs, "input features"))
        if isinstance(base, FourBitLinear):
            blocks = f"blocks of {base.block} input features"
            found.divisibilities.append(Divisibility(name, inputs // base.block, blocks))
        return
    region_name = region_of(found, name)
    assert region_name is not None
    region = found.regions[region_name]
    region.inputs.add(inputs)
    region.outputs.add(size)
    pieces = _pieces(found, modules, name, rule, size, region_name)
    if name in region.shared:
        return
    found.divisions |= {f"{inner}.{key}": Division(kind.out_dim, pieces) for key in output_names(base)}
    if base.bias is not None:
        found.divisions[f"{inner}.bias"] = Division(0, pieces)
    _divide_adapters(found, name, part, pieces, row=False)


def _divide_adapters(found: TPPlan, name: str, part: nn.Module, pieces: tuple[int, ...], *, row: bool) -> None:
    divisions, partial = divide_adapters(name, part, pieces, row=row)
    found.divisions |= divisions
    found.partial |= partial


def _pieces(
    found: TPPlan, modules: dict[str, nn.Module], name: str, rule: Rule, size: int, region_name: str
) -> tuple[int, ...]:
    """Returns the consecutive slices of a column projection's output, and records the counts that ranks divide."""
    region = found.regions[region_name]
    if rule in (Rule.COLUMN, Rule.GATE_UP):
        halves = 1 if rule is Rule.COLUMN else 2
        found.divisibilities.append(Divisibility(name, size // halves, "output features"))
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
            found.divisibilities.append(Divisibility(region_name, region.kv, "key/value heads"))
        return (size,)
    if rule in (Rule.QKV_GROUPED, Rule.QKV_BY_GROUP):
        region.kv, region.counts_by_config = kv_heads(name, asked, _row_heads(modules, region), size // width), True
        region.heads = size // width - 2 * region.kv
        found.divisibilities.append(Divisibility(region_name, region.heads, "heads"))
        parts = (region.heads * width, region.kv * width, region.kv * width)
        if region.kv == 1:  # Both rules have the same order.
            found.divisibilities.append(Divisibility(name, width, "features of its one key/value head"))
            region.gathered[name] = 2 * width
            return parts
        found.divisibilities.append(Divisibility(region_name, region.kv, "key/value heads"))
        return parts if rule is Rule.QKV_GROUPED else (size,)
    region.heads = of_queries // width
    found.divisibilities.append(Divisibility(region_name, region.heads, "heads"))
    return (of_queries,) * 3 if rule is Rule.QKV else (size,)


def _share_features(found: TPPlan, modules: dict[str, nn.Module], plan: ParallelPlan, ruled: dict[str, Rule]) -> None:
    """Notes the projections that each rank computes in full, some of whose features all heads use."""
    for name, part in modules.items() if plan.shared_features else ():
        count = plan.shared_features_for(name)
        if not count:
            continue
        base: Any = base_of(part)
        outputs = getattr(base, projection_kind(name, base).outputs)
        region = region_of(found, name)
        if region is None:  # An attention that stays whole.
            continue
        if name in ruled or not 0 < count < outputs:
            rule = f" and the rule {ruled[name]}" if name in ruled else ""
            raise DloError(
                f"shared_features must be fewer than the {outputs} output features of '{name}', which each rank"
                f" computes in full, got {count}{rule}; correct it in ParallelPlan(shared_features=...)"
            )
        found.regions[region].shared_features[name] = count


def _row_heads(modules: dict[str, nn.Module], region: RegionPlan) -> int:
    """Returns the number of heads that a region's row projection gets; 0 if it is not of whole heads."""
    base: Any = base_of(modules[region.rows[0]])
    inputs = int(getattr(base, projection_kind(region.rows[0], base).inputs))
    return inputs // region.width if inputs % region.width == 0 else 0


def _divide_vocabulary(found: TPPlan, name: str, part: nn.Module) -> None:
    check_adapted(name, part)
    base, inner = base_of(part), base_name(name, part)
    if not isinstance(base, nn.Embedding | nn.Linear):
        raise DloError(
            f"module '{name}' with the rule 'vocab' must be an Embedding or a Linear, got {type(part).__name__}; remove"
            " it from the plan's tensor rules"
        )
    _check_plain(name, base, Rule.VOCAB)
    size = base.weight.shape[0]
    found.vocabulary.append(name)
    for key, _ in base.named_parameters(recurse=False):
        found.divisions[f"{inner}.{key}"] = Division(0, (size,))
    _divide_adapters(found, name, part, (size,), row=False)


def _check_plain(name: str, part: nn.Module, rule: Rule) -> None:
    """Checks that a module's weights are parameters, and not computed from others."""
    computed = next((key for key in weight_names(part) if key not in part._parameters), None)
    if computed is not None:
        raise DloError(
            f"module '{name}' with the rule '{rule}' must have a {computed} of its own, got one that a parametrization,"
            " a weight norm or pruning computes; remove it from the plan's tensor rules"
        )


def _check_vocabulary(found: TPPlan, tp: int) -> None:
    for name in found.vocabulary:
        size = vocabulary_size(found, name)
        if size < tp:
            raise DloError(
                f"tp must be at most the {size} tokens of '{name}', so that each rank has one, got {tp}; set tp={size}"
            )


def _divide_norm(found: TPPlan, name: str, part: nn.Module) -> None:
    region = region_of(found, name)
    parameters = dict(part.named_parameters(recurse=False))
    if region is None or not type(part).__name__.endswith("RMSNorm") or list(parameters) != ["weight"]:
        raise DloError(
            f"module '{name}' with the rule 'column_norm' must be an RMS norm with a weight between sharded"
            f" projections, got {type(part).__name__}; remove the projections around it from the plan's tensor rules"
        )
    size = parameters["weight"].shape[0]
    found.regions[region].norms.append(name)
    found.divisions[f"{name}.weight"] = Division(0, (size,))
    found.divisibilities.append(Divisibility(name, size, "features"))


def _divide_channels(found: TPPlan, name: str, part: nn.Module) -> None:
    """Divides the parameters and running statistics of a module that computes with groups of channels alone."""
    region = region_of(found, name)
    if region is None or not is_channelwise(part):
        raise DloError(
            f"module '{name}' with the rule 'per_channel' must be a batch norm, or a convolution of several groups,"
            f" between sharded projections, got {type(part).__name__}; remove it from the plan's tensor rules"
        )
    found.regions[region].channelwise.append(name)
    channels = channel_count(part)
    for key, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None and tensor.ndim:
            found.divisions[f"{name}.{key}"] = Division(0, (tensor.shape[0],))
    found.divisibilities.append(Divisibility(name, channels, "channels, or groups of them"))


def _divide_parameters(found: TPPlan, module: nn.Module, plan: ParallelPlan) -> None:
    """Divides the parameters that a rule matches by their own name, and buffers that are not saved."""
    for name, parameter in (*module.named_parameters(remove_duplicate=False), *unsaved_buffers(module)):
        rule = plan.rule_for(name)
        owner = name.rpartition(".")[0]
        if rule not in _CUTTING or name in found.divisions or plan.rule_for(owner) is rule:
            continue
        region = region_of(found, name)
        if region is None or rule in (
            Rule.ROW,
            Rule.VOCAB,
            Rule.QKV,
            Rule.QKV_GROUPED,
            Rule.QKV_BY_GROUP,
            Rule.GATE_UP,
        ):
            raise DloError(
                f"rule '{rule}' must match a projection inside a region, got the parameter '{name}'; remove the rule"
            )
        dim = parameter.ndim - 1 if rule is Rule.LAST_DIM_HEADS else 0
        found.divisions[name] = Division(dim, (parameter.shape[dim],))
        found.divisibilities.append(Divisibility(name, parameter.shape[dim], "entries"))


def unsaved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that are not saved, by name."""
    for name, part in module.named_modules():
        for key in part._non_persistent_buffers_set:
            buffer = part._buffers.get(key)
            if buffer is not None:
                yield f"{name}.{key}" if name else key, buffer


def _share_among_tied(found: TPPlan, module: nn.Module) -> None:
    """Divides a tied parameter under all its names, once a rule divides it under one."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    for names in by_tensor.values():
        divisions = {found.divisions[name] for name in names if name in found.divisions}
        if len(divisions) > 1 or (divisions and any(name not in found.divisions for name in names)):
            raise DloError(f"tied parameters must have the same rule, got different ones for {names}; set one rule")
