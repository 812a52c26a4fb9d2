"""Records in a forward on fake tensors which projections of a block feed which; and compares blocks."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.batches import tree_leaves, tree_map_only
from dlo_framework.errors import DloError
from dlo_plugins.parallel.tensor.heads import parameter_names
from dlo_plugins.parallel.tensor.projections import is_channelwise, projection_kind

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
    found = ProjectionFlow()
    mode = _FlowMode(found, model, wide)
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
        found.stopped = error
    finally:
        for handle in handles:
            handle.remove()
    return found


class _FlowMode(TorchDispatchMode):
    """Mode that passes labels from the arguments of each operator to its results."""

    def __init__(self, found: ProjectionFlow, model: nn.Module, wide: bool) -> None:
        super().__init__()
        self._found = found
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
        self._found.calls.setdefault(name, BlockCall(args, kwargs, hidden))

    def enter_module(self, name: str, names: Sequence[str], module: nn.Module, args: Any, kwargs: Any) -> None:
        """Notes the tensors that a module gets from outside of its block."""
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        outside = {
            key: self._describe(value)
            for key, value in given.items()
            if key in names and isinstance(value, Tensor) and id(value) not in self._labels
        }
        self._found.operands.setdefault(name, outside)

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
            if block in self._found.calls:
                self._found.calls[block].used.add(at)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        weight = next((self._views[id(leaf)] for leaf in inputs if id(leaf) in self._views), None)
        labelled = [found for leaf in inputs if (found := self._labels.get(id(leaf)))]
        labels = frozenset().union(*labelled)
        name = func.overloadpacket.__name__
        between = next((self._channelwise[id(leaf)] for leaf in inputs if id(leaf) in self._channelwise), None)
        if between is not None and labels:
            self._found.channelwise[between] = self._found.channelwise.get(between, frozenset()) | labels
        if weight is not None and len(inputs) == 1:  # A view of the weight.
            self._views |= {id(leaf): weight for leaf in outputs}
            labels = frozenset()
        elif weight is not None and labelled:
            self._found.feeds[weight[0]] = self._found.feeds.get(weight[0], frozenset()) | (labels - {weight[0]})
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
        self._found.splits.setdefault(name, []).append(sizes)


def _outer_name(model: nn.Module, name: str) -> str:
    """Returns the name of the wrapper with adapters around a projection, or its own."""
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        if parent and hasattr(model.get_submodule(parent), "base_layer"):
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
