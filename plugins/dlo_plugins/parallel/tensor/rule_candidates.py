"""Candidates for the tensor rules of a block: an attention or MLP each, from the flow between its projections.

A forward on fake tensors records which projections feed which (:func:`record_flow`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.batches import tree_leaves, tree_map_only
from dlo_framework.errors import DloError
from dlo_framework.plan import Rule
from dlo_plugins.parallel.tensor.heads import operand_dim, parameter_names
from dlo_plugins.parallel.tensor.projections import base_of, is_adapted, is_channelwise, projection_kind
from dlo_plugins.parallel.tensor.tp_planner import SHAPING

#: Label of a block's input and of what a residual branch adds to it.
INPUT = "<input>"
#: Label of a product of two activations, as attention has.
PRODUCT = "<product>"

_PRODUCTS = ("bmm", "baddbmm", "mm", "matmul", "scaled_dot_product", "flex_attention")
_VIEWS = ("view", "_unsafe_view", "reshape")


@dataclass(frozen=True)
class TensorInput:
    """Tensor that a block gets, without its values.

    Attributes:
        shape: Shape.
        dtype: Dtype.
        is_trained: Whether it depends on a parameter outside the block.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool


@dataclass(frozen=True)
class BlockCall:
    """Arguments of a block's forward, with :class:`TensorInput` for tensors.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        hidden: Number, among the leaves of both, of the tensor that the residual stream is.
        used: Numbers of the leaves of its result that operators after it use; the others, such as attention
            probabilities, are only collected.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: int
    used: set[int] = field(default_factory=set, hash=False)


@dataclass
class ProjectionFlow:
    """Flow of activations between projections.

    Attributes:
        feeds: Labels of each projection's input, by its name: names of projections, :data:`INPUT`, :data:`PRODUCT`.
        channelwise: Labels of the input of each batch norm and of each convolution of each channel alone, by its name.
        splits: Sizes into which the output features of each projection are reshaped, in order of execution.
        calls: First call of each block that ran, by its name.
        operands: Tensors that a module with projections gets and that no projection of a block made, by the module's
            name and the argument's, from its first call.
        stopped: Error that ended the forward early; None if all of it ran.
    """

    feeds: dict[str, frozenset[str]] = field(default_factory=dict)
    channelwise: dict[str, frozenset[str]] = field(default_factory=dict)
    splits: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    calls: dict[str, BlockCall] = field(default_factory=dict)
    operands: dict[str, dict[str, TensorInput]] = field(default_factory=dict)
    stopped: Exception | None = None


def is_projection(module: nn.Module, wide: bool = False) -> bool:
    """Returns whether tensor parallelism can shard a module.

    Args:
        module: Module.
        wide: Whether convolutions of more than a pixel count.
    """
    if not wide and isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
        return False
    with contextlib.suppress(DloError):
        projection_kind("", module)
        return isinstance(getattr(module, "weight", None), Tensor)
    return False


def record_flow(
    model: nn.Module, blocks: Sequence[str], forward: Callable[[], Any], wide: bool = False
) -> ProjectionFlow:
    """Returns the flow in one forward.

    Args:
        model: Model with fake tensors.
        blocks: Names of its blocks.
        forward: Function that runs the model, inside a `FakeTensorMode`. If it fails, what ran before is returned.
        wide: Whether convolutions of more than a pixel count as projections.
    """
    flow = ProjectionFlow()
    mode = _FlowMode(flow, model, wide)
    handles = []
    for block in blocks:
        part = model.get_submodule(block)
        enter = functools.partial(mode.enter_block, block)
        handles.append(part.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(part.register_forward_hook(functools.partial(mode.leave_block, block)))
    for name, module in model.named_modules():
        inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if inside and not is_projection(module, wide) and any(is_projection(part, wide) for part in module.modules()):
            hook = functools.partial(mode.enter_module, name, parameter_names(module))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad(), mode:
            forward()
    except Exception as error:  # Any code of the model's may fail without values; the blocks that ran are known.
        flow.stopped = error
    finally:
        for handle in handles:
            handle.remove()
    return flow


class _FlowMode(TorchDispatchMode):
    """Mode that passes labels from the arguments of each operator to its results."""

    def __init__(self, flow: ProjectionFlow, model: nn.Module, wide: bool) -> None:
        super().__init__()
        self._flow = flow
        self._weights: dict[int, tuple[str, int]] = {}
        self._channelwise: dict[int, str] = {}
        self._convolutions: dict[str, int] = {}  # Numbers of output channels.
        for name, module in model.named_modules():
            if is_channelwise(module):
                own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
                self._channelwise |= {id(tensor): name for tensor in own if tensor.ndim}
            if is_projection(module, wide):
                kind = projection_kind(name, module)
                outer, outputs = _outer_name(model, name), int(getattr(module, kind.outputs))
                self._weights[id(module.weight)] = (outer, outputs)
                if isinstance(module, nn.Conv2d):
                    self._convolutions[outer] = outputs
        self._trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        self._labels: dict[int, frozenset[str]] = {}
        #: Views of weights, by id: name of the projection and its number of output features.
        self._views: dict[int, tuple[str, int]] = dict(self._weights)
        #: Results of blocks, by id: the block's name and the number among its result's leaves.
        self._results: dict[int, tuple[str, int]] = {}
        #: Tensors of which others are views, by the view's id.
        self._roots: dict[int, int] = {}
        self._alive: list[Any] = []  # So that no id is used twice.

    def enter_block(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Starts a block: its input gets the label :data:`INPUT` alone."""
        leaves = tree_leaves((args, kwargs))
        floats = (at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        hidden = next(floats, None)
        if hidden is None:
            return
        self._labels[id(leaves[hidden])] = frozenset({INPUT})
        self._alive.append(leaves[hidden])
        args, kwargs = tree_map_only(Tensor, self._describe, (args, kwargs))
        self._flow.calls.setdefault(name, BlockCall(args, kwargs, hidden))

    def enter_module(self, name: str, names: Sequence[str], module: nn.Module, args: Any, kwargs: Any) -> None:
        """Notes the tensors that a module gets from outside of its block."""
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        outside = {
            key: self._describe(value)
            for key, value in given.items()
            if key in names and isinstance(value, Tensor) and id(value) not in self._labels
        }
        self._flow.operands.setdefault(name, outside)

    def _describe(self, tensor: Tensor) -> TensorInput:
        return TensorInput(tuple(tensor.shape), tensor.dtype, id(tensor) in self._trained)

    def leave_block(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Ends a block: its result is watched for use."""
        for at, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor):
                self._results[id(leaf)] = (name, at)
                self._alive.append(leaf)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for block, at in (self._results[id(leaf)] for leaf in inputs if id(leaf) in self._results):
            if block in self._flow.calls:
                self._flow.calls[block].used.add(at)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        weight = next((self._views[id(leaf)] for leaf in inputs if id(leaf) in self._views), None)
        labelled = [of_leaf for leaf in inputs if (of_leaf := self._labels.get(id(leaf)))]
        labels = frozenset().union(*labelled)
        name = func.overloadpacket.__name__
        between = next((self._channelwise[id(leaf)] for leaf in inputs if id(leaf) in self._channelwise), None)
        if between is not None and labels:
            self._flow.channelwise[between] = self._flow.channelwise.get(between, frozenset()) | labels
        if weight is not None and len(inputs) == 1:  # A view of the weight.
            self._views |= {id(leaf): weight for leaf in outputs}
            labels = frozenset()
        elif weight is not None and labelled:
            self._flow.feeds[weight[0]] = self._flow.feeds.get(weight[0], frozenset()) | (labels - {weight[0]})
            labels = frozenset({weight[0]})
        elif len(labelled) > 1 and any(product in name for product in _PRODUCTS):
            labels |= {PRODUCT}
        elif name in _VIEWS and labels and outputs:
            self._record_split(labels, inputs[0], outputs[0])
        is_trained = any(id(leaf) in self._trained for leaf in inputs)
        self._follow_views(func, args, outputs, labels)
        for leaf in outputs:
            self._alive.append(leaf)
            if labels and (leaf.is_floating_point() or leaf.is_complex()):  # Indices have no gradient.
                self._labels[id(leaf)] = labels
            if is_trained:
                self._trained.add(id(leaf))
        return output

    def _follow_views(self, func: Any, args: Any, outputs: list[Tensor], labels: frozenset[str]) -> None:
        """Notes views, and gives a tensor the labels of what is written into a view of it."""
        declared = func._schema.arguments[0].alias_info if args and isinstance(args[0], Tensor) else None
        if declared is None:
            return
        root = self._roots.get(id(args[0]), id(args[0]))
        if not declared.is_write:
            self._roots |= {id(leaf): root for leaf in outputs}
            self._alive.append(args[0])
        elif labels:
            self._labels[root] = self._labels.get(root, frozenset()) | labels

    def _record_split(self, labels: frozenset[str], given: Tensor, made: Tensor) -> None:
        """Notes how the features of a single projection are reshaped."""
        if len(labels) != 1 or not made.ndim > given.ndim > 0:
            return
        name, first = next(iter(labels)), 0
        while first < given.ndim - 1 and made.shape[first] == given.shape[first]:
            first += 1
        sizes = tuple(made.shape[first:])
        if first < given.ndim - 1 and self._convolutions.get(name) == given.shape[first]:  # Pixels are after them.
            ends = (end for end in range(2, len(sizes)) if math.prod(sizes[:end]) == given.shape[first])
            sizes = sizes[: next(ends, len(sizes))]
        elif made.shape[-1] == given.shape[-1]:
            return
        self._flow.splits.setdefault(name, []).append(sizes)


def _outer_name(model: nn.Module, name: str) -> str:
    """Returns the name of the wrapper with adapters around a projection, or its own."""
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        if parent and is_adapted(model.get_submodule(parent)):
            return parent
    return name


#: Attributes that number a block: two blocks that differ only in these are of one kind.
_NUMBERS = ("idx", "index", "id", "number")


def block_kind(block: nn.Module) -> Any:
    """Returns a key of a block's kind: its modules' classes, settings and parameters' shapes."""
    kind = []
    for name, module in block.named_modules():
        settings = sorted(
            (key, str(value))
            for key, value in vars(module).items()
            if isinstance(value, int | str) and not key.endswith(_NUMBERS)
        )
        shapes = tuple((key, tuple(tensor.shape)) for key, tensor in module.named_parameters(recurse=False))
        kind.append((name, type(module), tuple(settings), shapes))
    return tuple(kind)


#: Factor by which the output of a bottleneck, such as a squeeze-and-excitation's, is wider than its hidden features.
_BOTTLENECK = 4
#: Factor by which a projection that is left whole is smaller than the largest of its block.
_SMALL = 32
_FUSED = (Rule.QKV, Rule.QKV_BY_HEAD, Rule.QKV_GROUPED)


@dataclass(frozen=True)
class Candidate:
    """Row projection with the projections that feed it, and variants of rules for them.

    Attributes:
        row: Name of the row projection in its block.
        columns: Names of the projections that feed it.
        is_attention: Whether activations are multiplied between them.
        around: Name of the innermost module that contains all of them; empty for the block.
        variants: Rules to try, in this order.
        head_width: Number of features of a head; None if no reshape shows it.
        operands: Arguments of `around` that may have an entry for each head, with that dim; alternatives to try, in
            this order.
        shared: Numbers of last output features that all heads use, by the name of a projection that stays whole.
    """

    row: str
    columns: tuple[str, ...]
    is_attention: bool
    around: str
    variants: tuple[Mapping[str, Rule], ...] = field(hash=False)
    head_width: int | None = None
    operands: tuple[Mapping[str, int], ...] = field(default=({},), hash=False)
    shared: Mapping[str, int] = field(default_factory=dict, hash=False)


def find_candidates(block: nn.Module, prefix: str, flow: ProjectionFlow) -> list[Candidate]:
    """Returns the candidates of a block, attentions first, then the largest.

    Args:
        block: Block.
        prefix: Name of the block in the model.
        flow: Flow between the model's projections.
    """
    candidates = []
    for full, labels in flow.feeds.items():
        columns = sorted(labels - {PRODUCT, INPUT})
        inside = all(name.startswith(f"{prefix}.") for name in (full, *columns))
        if not columns or INPUT in labels or not inside:
            continue
        row = full.removeprefix(f"{prefix}.")
        names = tuple(name.removeprefix(f"{prefix}.") for name in columns)
        splits = {name: flow.splits.get(f"{prefix}.{name}", []) for name in names}
        from_input = [name for name in names if INPUT in flow.feeds.get(f"{prefix}.{name}", ())]
        made = [_candidate(block, row, names, PRODUCT in labels, splits, from_input)]
        if PRODUCT in labels:
            feeds = {name: flow.feeds.get(f"{prefix}.{name}", frozenset()) for name in names}
            latents = {name: [other for other in names if feeds[other] == {f"{prefix}.{name}"}] for name in from_input}
            made = [*_by_heads(block, row, names, splits, latents), *made]
        for one in made:
            around = f"{prefix}.{one.around}" if one.around else prefix
            cut = [f"{prefix}.{name}" for name in one.columns]
            more = {**_between(prefix, cut, flow), **({} if one.is_attention else _gates(prefix, cut, flow))}
            variants = tuple({**more, **variant} for variant in one.variants)
            operands = _operands(block, one, flow.operands.get(around, {}), flow.calls.get(prefix))
            candidates.append(replace(one, variants=variants, operands=operands))
    worth = [one for one in candidates if _is_worth_it(block, one)]
    attentions = [one for one in worth if one.is_attention]
    others = [one for one in worth if not one.is_attention]
    # The largest first: a block with a gate is cut around it rather than inside.
    return attentions + sorted(others, key=lambda one: -_weight(block, one.row).numel())


def _between(prefix: str, columns: list[str], flow: ProjectionFlow) -> dict[str, Rule]:
    """Returns the rules of modules that compute with each channel of columns' outputs alone."""
    names = [name for name, labels in flow.channelwise.items() if labels - {PRODUCT} <= {*columns}]
    return {name.removeprefix(f"{prefix}."): Rule.PER_CHANNEL for name in names if name.startswith(f"{prefix}.")}


def _gates(prefix: str, columns: list[str], flow: ProjectionFlow) -> dict[str, Rule]:
    """Returns the rules of row projections between columns, as in a squeeze-and-excitation.

    Its first projection needs all channels, and the second gives a gate for each: columns feed a row that feeds a
    column.
    """
    rules: dict[str, Rule] = {}
    for column in columns:
        labels = flow.feeds.get(column, frozenset())
        if labels and INPUT not in labels and not labels & {*columns}:
            rows = [name for name in labels if flow.feeds.get(name, frozenset({INPUT})) - {PRODUCT} <= {*columns}]
            rules |= {name.removeprefix(f"{prefix}."): Rule.ROW for name in rows if name.startswith(f"{prefix}.")}
    return rules


def _is_worth_it(block: nn.Module, candidate: Candidate) -> bool:
    """Returns whether a cut saves more than it communicates: not of a bottleneck, nor of a small mix of heads."""
    outputs, inputs = _features(block, candidate.row)
    if not candidate.is_attention and _BOTTLENECK * inputs <= outputs:
        return False
    every = [module for module in block.modules() if is_projection(module, wide=True)]
    projections = [module for module in every if is_projection(module)] or every
    largest = max(cast("nn.Parameter", projection.weight).numel() for projection in projections)
    return _SMALL * outputs * inputs >= largest


def _candidate(
    block: nn.Module,
    row: str,
    columns: tuple[str, ...],
    is_attention: bool,
    splits: Mapping[str, list[tuple[int, ...]]],
    from_input: list[str],
) -> Candidate:
    around = _common_parent([row, *columns])
    sizes = {name: _features(block, name)[0] for name in columns}
    inputs = _features(block, row)[1]
    if not is_attention:
        halves = [Rule.GATE_UP, Rule.COLUMN] if len(columns) == 1 and sizes[columns[0]] == 2 * inputs else [Rule.COLUMN]
        norms = _head_parameters(block, around, [row, *columns], {inputs}, None)
        rules = [
            {**more, **dict.fromkeys(columns, rule), row: Rule.ROW}
            for rule in halves
            for more in ([norms, {}] if norms else [{}])
        ]
        return Candidate(row, columns, False, around, tuple(rules))
    entering = [name for name in columns if name in from_input] or list(columns)
    width = next((shape[-1] for name in entering for shape in splits[name] if len(shape) > 1), None)
    is_fused = len(entering) == 1
    if width and is_fused and any(len(one) == 2 and math.prod(one) == 3 * inputs for one in splits[entering[0]]):
        width //= 3  # [heads, 3 * head_dim]
    heads = inputs // width if width and inputs % width == 0 else None
    largest = max(sizes[name] for name in entering)
    choices = [
        _fused(sizes[name], inputs, splits[name]) if is_fused else _rules_of(sizes[name], inputs, largest)
        for name in entering
    ]
    extras = _head_parameters(block, around, [row, *entering], {inputs, *(sizes[name] for name in entering)}, heads)
    every = [extras, {}] if extras else [{}]
    variants = (
        {**more, **dict(zip(entering, combination, strict=True)), row: Rule.ROW}
        for combination in itertools.product(*choices)
        for more in every
    )
    return Candidate(row, tuple(entering), True, around, _with_shaping(variants, around), width)


def _with_shaping(variants: Iterable[dict[str, Rule]], around: str) -> tuple[dict[str, Rule], ...]:
    """Returns rules of an attention, each alone and with each rule of how its code reshapes."""
    return tuple(one for plain in variants for one in (plain, *({**plain, around: rule} for rule in SHAPING)))


def _by_heads(
    block: nn.Module,
    row: str,
    columns: tuple[str, ...],
    splits: Mapping[str, list[tuple[int, ...]]],
    latents: Mapping[str, list[str]],
) -> Iterator[Candidate]:
    """Yields candidates whose columns have heads of different widths, each head's features together.

    With multi-head latent attention, a projection gives a latent that feeds a column, and features that all heads use:
    it stays whole. LeViT's queries, keys and values have different widths.

    Args:
        block: Block.
        row: Name of the row projection.
        columns: Names of the projections that feed it.
        splits: Reshapes of their outputs.
        latents: Names of the projections that feed on one of them alone, by its name.
    """
    shared: dict[str, int] = {}
    for name, fed in latents.items():
        used = {_features(block, other)[1] for other in fed}
        if len(used) == 1:
            shared[name] = _features(block, name)[0] - used.pop()
    entering = [name for name in columns if name not in shared]
    sizes, inputs = {name: _features(block, name)[0] for name in entering}, _features(block, row)[1]
    widths = {
        name: shape[-1]
        for name in entering
        for shape in splits[name]
        if len(shape) > 1 and shape[-2] * shape[-1] == sizes[name]
    }
    is_usual = len({*widths.values()}) == 1 and (len(entering) > 1 or sizes[entering[0]] == 3 * inputs)
    if not widths or (is_usual and not shared) or any(count <= 0 for count in shared.values()):
        return
    first = max(widths, key=lambda name: sizes[name])
    heads = sizes[first] // widths[first]
    if heads < 2 or any(size % heads for size in (*sizes.values(), inputs)):
        return
    around = _common_parent([row, *columns])
    extras = _head_parameters(block, around, [row, *columns], {inputs, *sizes.values()}, heads)
    own = {
        name: rule
        for name, rule in extras.items()
        if not is_projection(block.get_submodule(name.rpartition(".")[0]), wide=True)
    }
    every = [one for at, one in enumerate((extras, own, {})) if one not in (extras, own, {})[:at]]
    variants = ({**more, **dict.fromkeys(entering, Rule.COLUMN), first: Rule.HEADS, row: Rule.ROW} for more in every)
    shaped = _with_shaping(variants, around)
    yield Candidate(row, tuple(entering), True, around, shaped, widths[first], shared=shared)


def _operands(
    block: nn.Module, candidate: Candidate, given: Mapping[str, TensorInput], call: BlockCall | None
) -> tuple[Mapping[str, int], ...]:
    """Returns the operands of an attention that may be of heads: none, all of those, each."""
    inputs = _features(block, candidate.row)[1]
    if not candidate.is_attention or not candidate.head_width or call is None:
        return ({},)
    rows, tokens = (*tree_leaves((call.args, call.kwargs))[call.hidden].shape, 0)[:2]
    dims = {
        name: operand_dim(tensor.shape, inputs // candidate.head_width, rows, tokens) for name, tensor in given.items()
    }
    known = {name: dim for name, dim in dims.items() if dim is not None}
    alone = ({name: dim} for name, dim in known.items()) if len(known) > 1 else ()
    return ({}, known, *alone) if known else ({},)


def _fused(size: int, inputs: int, splits: list[tuple[int, ...]]) -> tuple[Rule, ...]:
    """Returns the rules of one projection of queries, keys and values, the likeliest first."""
    if size != 3 * inputs:
        return (Rule.QKV_GROUPED, Rule.QKV_BY_GROUP, Rule.QKV_BY_HEAD, Rule.QKV)
    by_head = any((len(shape) == 3 and shape[-2] == 3) or (len(shape) == 2 and len(splits) == 1) for shape in splits)
    return (Rule.QKV_BY_HEAD, Rule.QKV, Rule.QKV_GROUPED) if by_head else _FUSED


def _rules_of(size: int, inputs: int, largest: int) -> tuple[Rule, ...]:
    """Returns the rules of one of several projections that feed an attention's row projection."""
    if size == 2 * inputs == largest:  # Keys and values, or queries and a gate.
        return (Rule.GATE_UP, Rule.HEADS)
    return (Rule.HEADS,) if size == largest else (Rule.KV_HEADS, Rule.COLUMN)


def _head_parameters(
    block: nn.Module, around: str, projections: list[str], features: set[int], heads: int | None
) -> dict[str, Rule]:
    """Returns the rules of parameters with an entry per head, or per feature of all heads."""
    rules: dict[str, Rule] = {}
    module = block.get_submodule(around)
    for name, part in module.named_modules():
        full = ".".join(filter(None, (around, name)))
        if any(full == one or full.startswith(f"{one}.") for one in projections):
            continue
        kind = type(part).__name__
        parameters: dict[str, Any] = dict(part.named_parameters(recurse=False))
        if kind.endswith("RMSNorm") and [*parameters] == ["weight"] and parameters["weight"].numel() in features:
            rules[full] = Rule.COLUMN_NORM
        elif "Norm" not in kind:
            buffers = dict(part.named_buffers(recurse=False))
            parameters |= {key: buffers[key] for key in buffers if key in part._non_persistent_buffers_set}
            for key, parameter in parameters.items():
                rule = _head_rule(tuple(parameter.shape), features, heads)
                if rule is not None:
                    rules[f"{full}.{key}" if full else key] = rule
    return rules


def _head_rule(shape: tuple[int, ...], features: set[int], heads: int | None) -> Rule | None:
    if not shape or heads is None or heads == 1:
        return None
    if shape[0] == heads or (len(shape) == 1 and shape[0] in features):
        return Rule.HEADS
    return Rule.LAST_DIM_HEADS if len(shape) > 1 and shape[-1] == heads else None


def _weight(block: nn.Module, name: str) -> nn.Parameter:
    return cast("nn.Parameter", base_of(block.get_submodule(name)).weight)


def _common_parent(names: list[str]) -> str:
    paths = [name.split(".")[:-1] for name in names]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def _features(block: nn.Module, name: str) -> tuple[int, int]:
    """Returns the numbers of output and input features of a projection."""
    base: Any = base_of(block.get_submodule(name))
    kind = projection_kind(name, base)
    return int(getattr(base, kind.outputs)), int(getattr(base, kind.inputs))
