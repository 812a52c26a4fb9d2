"""Parallel plan of a model: patterns, as pure data, for tensor, pipeline and context parallelism and FSDP.

A plan names parts of a model by patterns. A pattern is a dotted module or parameter name in which `*` matches exactly
one name between dots, `**` any number of them, and `?` and `[...]` work as in a shell: `blocks.*` matches `blocks.0`
and `blocks.11`, not `blocks.0.attn`. A pattern covers the modules that it matches and all their submodules.

Appliers each rewrite a module in place before training for one technique, as its plan says. A strategy sorts the
appliers of a run by phase, so their one valid order (tensor parallel, experts, context parallel,
pipeline stages, recomputation, compile, shard) is defined in this file alone.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dlo_framework.errors import DloError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh


#: Blocks that have less than this fraction of a model's parameters are used only where no other class repeats: 1 / 8.
_FEW = 8


class NoBlocksError(DloError):
    """No class of blocks repeats in a module, so that its plan cannot be inferred."""


class Rule(enum.StrEnum):
    """Rule of tensor parallelism for a module or parameter (Shoeybi et al. 2019, arXiv 1909.08053)."""

    COLUMN = "column"
    """Output features split over ranks, and the bias with them; the output stays split."""
    ROW = "row"
    """Input features split; partial outputs are summed over ranks and the bias is added once."""
    QKV = "qkv"
    """Fused projection, output `[3, heads, head_dim]`: whole heads of each of the three go to a rank."""
    QKV_BY_HEAD = "qkv_by_head"
    """Fused projection, output `[heads, 3, head_dim]`: a rank's heads are contiguous."""
    QKV_GROUPED = "qkv_grouped"
    """Fused projection, output `[heads + 2 * kv_heads, head_dim]`: whole heads of each of the three. One key/value head
    of all queries is computed by all ranks together."""
    QKV_BY_GROUP = "qkv_by_group"
    """Fused projection, output `[kv_heads, heads / kv_heads + 2, head_dim]`: a rank's groups are contiguous."""
    GATE_UP = "gate_up"
    """Fused projection of a gated MLP, output `[2, features]`: columns of both halves."""
    HEADS = "heads"
    """Column, cut between whole query heads."""
    KV_HEADS = "kv_heads"
    """Column, cut between whole key/value heads (fewer than query heads in grouped-query attention)."""
    COLUMN_NORM = "column_norm"
    """An RMS norm over all features that column projections give: weight split, mean square over all ranks."""
    LAST_DIM_HEADS = "last_dim_heads"
    """A tensor whose last dim is one entry a head, such as a table of relative position biases."""
    PER_CHANNEL = "per_channel"
    """A batch norm, or a convolution of several groups, such as one for each channel, between projections: parameters
    and running statistics are split with the channels."""
    VOCAB = "vocab"
    """Embedding rows, or the logits' columns, split over the vocabulary."""
    SEQUENCE = "sequence"
    """Works on activations split along the sequence; its own parameters are whole on each rank."""
    LOCAL_SHAPES = "local_shapes"
    """An attention whose code reshapes to full numbers of heads or features: each rank reshapes to its share."""
    LOCAL_COUNTS = "local_counts"
    """`local_shapes` for code that also reads numbers of heads from attributes: they are set to the rank's."""
    REPLICATE = "replicate"
    """Whole on each rank. What no pattern matches is replicated."""


@dataclass(frozen=True)
class ParallelPlan:
    """Describes how a model may be split. Names are relative to the model itself (a task's `model`).

    Args:
        blocks: Patterns of the repeated blocks, in the order of execution: the unit of sharding, recomputation, compile
            and pipeline split.
        stem: Patterns of the modules that run before the first block, in the first pipeline stage.
        head: Patterns of the modules that run after the last block, in the last pipeline stage.
        between: Patterns of the stem's modules that run after the blocks of the first pattern, and before all others,
            such as a decoder's embedding: in the pipeline stage with the last of the former.
        carried: Names of arguments of the blocks' forward that are computed in earlier blocks or in the stem, such as
            an encoder's output in a decoder. Pipeline stages pass them on with the hidden state.
        tensor: Mapping of patterns to :class:`Rule`, or its name; the first pattern that matches a name, or a parent of
            it, applies.
        attention: Patterns of the attention modules, which context parallelism wraps and whose heads are counted.
        tied: Groups of parameter names that share one tensor, such as an embedding and the output projection.
        experts: Patterns of the mixtures of experts: the modules that hold a router and its experts. Modules that they
            match without experts are the dense layers between. See :func:`dlo_framework.models.experts.find_mixtures`.
        head_widths: Mapping of patterns of attention modules to the number of features of a head, for modules without
            an attribute `head_dim` or `num_heads`.
        head_operands: Mapping of patterns of attention modules to arguments of their forward that have an entry for
            each head, made outside of the module, such as a bias; each name with its dim of `heads`, or of
            `samples * heads`. An attention whose heads are divided gets its own heads' entries.
        shared_features: Mapping of patterns of projections that each rank computes in full to the number of their last
            output features that all heads use as they are, such as the rotary key of multi-head latent attention. The
            features before them feed a column projection.

    Raises:
        DloError: for an unknown rule, or a tied group of fewer than two names.
    """

    blocks: tuple[str, ...] = ()
    stem: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    tensor: Mapping[str, Rule | str] = field(default_factory=dict, hash=False)
    attention: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    experts: tuple[str, ...] = ()
    head_widths: Mapping[str, int] = field(default_factory=dict, hash=False)
    head_operands: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)
    shared_features: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("blocks", "stem", "head", "between", "carried", "attention", "experts"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        object.__setattr__(self, "tensor", {pattern: _rule(rule) for pattern, rule in self.tensor.items()})
        object.__setattr__(self, "tied", tuple(tuple(group) for group in self.tied))
        for group in self.tied:
            if len(set(group)) < 2:
                raise DloError(f"a tied group must name at least two parameters, got {list(group)}; remove it")

    @classmethod
    def infer(cls, module: nn.Module) -> ParallelPlan:
        """Derives a plan without tensor rules for any module that repeats one class of block.

        Blocks are the children of one class in `ModuleList` or `Sequential` containers: of all the classes
        for which everything else is registered before the first or after the last block, that with the most
        blocks. Where these have less than an eighth of the parameters, or there are none, but a class in containers of
        two and more has half of them, the blocks are those of that class and the modules between them, such as the
        patch embeddings at the start of stages. Parameters held directly by the blocks' parents count as stem.

        Raises:
            NoBlocksError: if no class of blocks repeats so.
        """
        total = _count(module.parameters())
        candidates = [(blocks, _sides(module, blocks)) for blocks in _repeated(module)]
        alone = [(blocks, sides) for blocks, sides in candidates if not sides.between]
        best = max(alone, key=lambda one: len(one[0]), default=None)
        if best is None or _FEW * _count_of(module, best[0]) < total:
            spread = [one for one in candidates if _is_spread(module, *one, total)]
            best = max(spread, key=lambda one: len(one[0]), default=best)
        if best is not None:
            blocks, sides = best
            names = {*blocks, *sides.between}
            in_order = tuple(name for name, _ in module.named_modules(remove_duplicate=False) if name in names)
            return cls(blocks=in_order, stem=sides.stem, head=sides.head, tied=tied_groups(module))
        raise NoBlocksError(
            f"{type(module).__name__} must hold two or more consecutive blocks of one class in a ModuleList or"
            " Sequential, got none; name them in Task.parallel_plan: ParallelPlan(blocks=(...), stem=(...), head=(...))"
        )

    def block_names(self, module: nn.Module, *, repeated: bool = False) -> list[str]:
        """Returns the names of the blocks in the order of the patterns; of one, in which `module` registers them.

        Args:
            module: Model.
            repeated: Whether a block that is registered several times has a name for each, as a forward calls it; by
                default it has its first one.
        """
        modules = dict(module.named_modules(remove_duplicate=not repeated))
        names: dict[str, None] = {}
        places = set[tuple[int, str]]()  # A container with two names has each of its blocks once.
        for name in modules:
            parent, _, leaf = name.rpartition(".")
            if name and (id(modules[parent]), leaf) not in places:
                places.add((id(modules[parent]), leaf))
                names[name] = None
        block_names: dict[str, None] = {}
        for pattern in self.blocks:
            exact = [pattern] if pattern in names else None
            block_names |= dict.fromkeys(exact or (name for name in names if _any_match((pattern,), name)))
        return list(block_names)

    def attention_names(self, module: nn.Module) -> list[str]:
        """Returns the names of the attention modules in the order in which `module` registers them."""
        return [name for name, _ in module.named_modules() if name and _any_match(self.attention, name)]

    def expert_names(self, module: nn.Module) -> list[str]:
        """Returns the names of the modules that `experts` matches, in the order in which `module` registers them."""
        return [name for name, _ in module.named_modules() if name and _any_match(self.experts, name)]

    def rule_for(self, name: str) -> Rule:
        """Returns the rule of a module or parameter: the first pattern that matches it or a parent of it."""
        for pattern, rule in self.tensor.items():
            if _owns(pattern, name):
                return _rule(rule)
        return Rule.REPLICATE

    def has_rule_for(self, name: str) -> bool:
        """Returns whether a pattern matches a module or parameter, or a parent of it; its rule may be `replicate`."""
        return any(_owns(pattern, name) for pattern in self.tensor)

    def head_width_for(self, name: str) -> int | None:
        """Returns the width of an attention module's heads, if `head_widths` names it."""
        return next((width for pattern, width in self.head_widths.items() if _any_match((pattern,), name)), None)

    def head_operands_for(self, name: str) -> Mapping[str, int]:
        """Returns the arguments of an attention module that have an entry for each head, with their dims."""
        operands = (given for pattern, given in self.head_operands.items() if _any_match((pattern,), name))
        return next(operands, {})

    def shared_features_for(self, name: str) -> int:
        """Returns the number of a projection's last output features that all heads use; 0 if none are named."""
        counts = (count for pattern, count in self.shared_features.items() if _any_match((pattern,), name))
        return next(counts, 0)

    def owners(self, name: str) -> list[str]:
        """Returns which of `"stem"`, `"blocks"` and `"head"` own a parameter; exactly one in a valid plan."""
        parts = {"stem": self.stem, "blocks": self.blocks, "head": self.head}
        return [part for part, patterns in parts.items() if any(_owns(pattern, name) for pattern in patterns)]

    def validate(self, module: nn.Module) -> None:
        """Checks that the plan fits `module`, which may be on the meta device, before anything is split.

        Raises:
            DloError: for a pattern that matches nothing, blocks within blocks, a parameter or buffer with no owner or
                with two, and tied groups that are not the tensors that are in fact shared.
        """
        tensors = dict(named_tensors(module))
        names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
        self._check_patterns(names, list(tensors))
        blocks = self.block_names(module)
        inner = next((name for name in blocks if any(name.startswith(other + ".") for other in blocks)), None)
        if inner:
            raise DloError(
                f"blocks must not contain each other, got '{inner}' inside another; narrow {list(self.blocks)}"
            )
        for name in tensors:
            self._check_owner(name, names)
        self._check_tied(module, tensors)

    def _check_patterns(self, modules: list[str], tensors: list[str]) -> None:
        for part in ("blocks", "attention", "experts", "stem", "head", "between", "tensor"):
            names = modules if part in ("blocks", "attention", "experts") else [*modules, *tensors]
            for pattern in getattr(self, part):
                _check_matches(part, pattern, names)

    def _check_owner(self, name: str, modules: list[str]) -> None:
        owners = self.owners(name)
        if len(owners) == 1:
            return
        top = name.split(".")[0]
        if not owners:
            raise DloError(
                f"each parameter and buffer must belong to stem, blocks or head, got '{name}' in none of them; add"
                f" '{top}' to stem (if it runs before '{next(iter(self.blocks), 'the blocks')}') or to head"
            )
        raise DloError(
            f"each parameter and buffer must belong to one of stem, blocks and head, got '{name}' in"
            f" {' and '.join(owners)}; remove the pattern that matches it from {owners[-1]}"
        )

    def _check_tied(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        for group in self.tied:
            for name in group:
                if name not in tensors:
                    raise DloError(f"tied must name parameters of the model, got '{name}'{did_you_mean(name, tensors)}")
            other = next((name for name in group if tensors[name] is not tensors[group[0]]), None)
            if other:
                raise DloError(
                    f"tied parameters must share one tensor, got two for '{group[0]}' and '{other}'; tie them in the"
                    f" model (one nn.Parameter under both names) or remove the group from the plan"
                )
        declared = [set(group) for group in self.tied]
        for shared in tied_groups(module):
            apart = len({self._place(name) for name in shared}) > 1
            if apart and not any(set(shared) <= group for group in declared):
                raise DloError(
                    f"parameters of different parts that share one tensor must be in tied, got {list(shared)}; add them"
                )

    def _place(self, name: str) -> str:
        """Returns the block that holds a parameter, or else the part that owns it."""
        return _block_of(self.blocks, name) or self.owners(name)[0]


def match_names(patterns: Iterable[str], names: Iterable[str], known: Iterable[str], rule: str) -> list[str]:
    """Returns the names that patterns match, or that belong to a module which they match, in the patterns' order.

    Args:
        patterns: Patterns.
        names: Names to match.
        known: Names to offer in place of a pattern that matches none.
        rule: Rule in the error, such as "each pattern of exclude must match a parameter".

    Raises:
        DloError: for a pattern that matches none.
    """
    names, all_matched = list(names), dict[str, None]()
    for pattern in patterns:
        matched = [name for name in names if _owns(pattern, name)]
        if not matched:
            raise DloError(f"{rule}, got '{pattern}'{did_you_mean(pattern, list(known)) or '; remove it'}")
        all_matched |= dict.fromkeys(matched)
    return list(all_matched)


def tied_groups(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the groups of parameter names of `module` that share one tensor, in order of registration."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern: `*` is one name, `**` any number of them."""
    out, rest = "", pattern
    while rest:
        match = re.match(r"\*\*|\*|\?|\[!?[^\]]+\]", rest)
        token = match.group() if match else rest[0]
        wild = {"**": ".*?", "*": "[^.]+", "?": "[^.]"}
        if token in wild:
            out += wild[token]
        elif match:
            out += token.replace("[!", "[^")
        else:
            out += re.escape(token)
        rest = rest[len(token) :]
    return re.compile(out)


def _owns(pattern: str, name: str) -> bool:
    """Whether `pattern` matches `name` or a parent of it."""
    return _owned_prefix(pattern, name) is not None


@lru_cache(maxsize=65536)
def _owned_prefix(pattern: str, name: str) -> str | None:
    match = re.match(f"(?:{_regex(pattern).pattern})(?=\\.|$)", name)
    return match.group() if match else None


def _any_match(patterns: Iterable[str], name: str) -> bool:
    return any(_regex(pattern).fullmatch(name) for pattern in patterns)


def _block_of(blocks: Iterable[str], name: str) -> str | None:
    return next((prefix for p in blocks if (prefix := _owned_prefix(p, name)) is not None), None)


def _rule(rule: Rule | str) -> Rule:
    try:
        return Rule(rule)
    except ValueError:
        raise DloError(
            f"unknown tensor rule '{rule}'{did_you_mean(str(rule), list(Rule))}; available: {', '.join(Rule)}"
        ) from None


def _check_matches(part: str, pattern: str, names: list[str]) -> None:
    if not any(_any_match((pattern,), name) for name in names):
        # `*` mostly matches numbers, so the nearest name is searched among names without them.
        shapes = dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
        raise DloError(f"{part} pattern '{pattern}' matches nothing in the model{did_you_mean(pattern, shapes)}")


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields a module's parameters and buffers by all of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _repeated(module: nn.Module) -> Iterator[list[str]]:
    """Yields, for each class of children that containers repeat, the names of all those children.

    A module that is registered twice is a child under its first name.
    """
    from torch import nn

    by_class: dict[type[nn.Module], list[str]] = {}
    modules = dict(module.named_modules())
    for name, child in modules.items():
        is_repeated = name and isinstance(modules[name.rpartition(".")[0]], nn.ModuleList | nn.Sequential)
        if is_repeated and next(child.parameters(), None) is not None:
            by_class.setdefault(type(child), []).append(name)
    for names in by_class.values():
        outer = [name for name in names if not any(name.startswith(other + ".") for other in names)]
        if Counter(name.rpartition(".")[0] for name in outer).most_common(1)[0][1] >= 2:
            yield outer


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _count_of(module: nn.Module, names: list[str]) -> int:
    return sum(_count(module.get_submodule(name).parameters()) for name in names)


def _is_spread(module: nn.Module, blocks: list[str], sides: _Sides, total: int) -> bool:
    """Returns whether blocks have half of the parameters, in containers of two and more of them on average."""
    containers = {name.rpartition(".")[0] for name in blocks}
    is_regular = len(blocks) >= 2 * len(containers) and len(sides.between) < len(blocks)
    return is_regular and 2 * _count_of(module, blocks) >= total


class _Sides(NamedTuple):
    """Names of what is registered before the first block, between blocks, and after the last."""

    stem: tuple[str, ...]
    between: tuple[str, ...]
    head: tuple[str, ...]


def _sides(module: nn.Module, blocks: list[str]) -> _Sides:
    stem: dict[str, None] = {}
    between: dict[str, None] = {}
    head: dict[str, None] = {}
    order = [name for name, _ in module.named_modules(remove_duplicate=False)]
    first, last = order.index(blocks[0]), order.index(blocks[-1])
    parents = {".".join(pieces[:i]) for b in blocks for pieces in [b.split(".")] for i in range(len(pieces))}
    for name, _ in named_tensors(module):
        if any(name.startswith(block + ".") for block in blocks):
            continue
        owner = name.rpartition(".")[0]
        if owner in parents:
            stem[name] = None
            continue
        # The outermost module around this tensor that holds no block: the unit that moves with a stage.
        pieces = owner.split(".")
        unit = next(u for i in range(len(pieces)) if (u := ".".join(pieces[: i + 1])) not in parents)
        at = order.index(unit)
        (between if first < at < last else stem if at < first else head)[unit] = None
    return _Sides(tuple(stem), tuple(between), tuple(head))


class Phase(enum.IntEnum):
    """Phase of an applier; phases run in ascending order."""

    TENSOR = 10
    EXPERTS = 12
    CONTEXT = 20
    STAGES = 25
    CHECKPOINT = 30
    COMPILE = 40
    SHARD = 50


class Applier(ABC):
    """Rewrites a module in place. Subclasses set :attr:`phase` and implement :meth:`apply`."""

    phase: ClassVar[Phase]
    #: Axis of the mesh along which it works; a run with one rank of the axis leaves it out. None for every mesh.
    axis: ClassVar[str | None] = None
    #: Whether it needs the model's plan, which only a task has.
    needs_plan: ClassVar[bool] = True

    @abstractmethod
    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Rewrites ``module`` in place for ``mesh``, and splits it only where ``plan`` allows.

        Raises:
            DloError: if the module cannot be split so; the message computes the nearest size that works.
        """

    def apply_to_run(self, run: Any) -> None:
        """Rewrites the module of a run; by default by :meth:`apply`.

        Args:
            run: Strategy's record of the run, with at least its ``model``, its ``mesh`` and the model's ``plan``.
        """
        self.apply(run.model, run.mesh, run.plan)
