"""Finds the modules that mix positions under context parallelism, and runs those that cannot share them on full ones.

Attention that transformers computes through its AttentionInterface is shared among ranks. Any other module that mixes
positions is gathered: state-space layers, linear attention, convolutions, and attention with a bias or a mask of its
own. Whether a module mixes positions is found by its arguments, as it must get a cache, a state or a mask, and by
convolutions inside.

A gathered module is computed in full on each rank: its inputs are gathered, and of its output each rank keeps its own
positions. Backward sums the gradient of the gathered inputs over the ranks. The result is exact. The module's
computation and its activations are not divided by the ranks; those of all other modules are.

A model that makes positions, masks or biases by itself runs on full inputs up to its first block. Each block cuts its
input to this rank's shard, while positions, masks and biases stay full for the modules that are gathered.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dlo_framework.batches import tree_map_only
from dlo_framework.distributed.collectives import with_backward
from dlo_framework.errors import DloError
from dlo_framework.models.hugging_face import attention_implementation, is_bidirectional
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.context.context_sequence import ContextSequence
from dlo_plugins.parallel.context.sequence_layout import concat_shards, shard_sequence
from dlo_plugins.parallel.context.shared_attention import UNSHARDED, Ring

Gather = Literal["auto", "all"]

#: Parameters of a forward that tell a module that mixes positions: what it has seen before, and what it may see.
_STATES = ("cache", "cache_params", "past_key_values", "past_key_value", "layer_past", "state", "kv_cache")
_MASK = "attention_mask"
#: Kinds of layers (`config.layer_types`) with attention over all tokens or a window, or without attention.
_SHAREABLE = {"full_attention", "sliding_attention", "attention", "linear_attention", "conv", "mamba", "mlp", "moe"}
#: Model types whose attention makes a mask of its own inside.
_OWN_MASKS = {"doge"}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d)
#: Names of modules with one row for each position, from which a model adds absolute positions.
_TABLES = ("embed_positions", "position_embeddings", "wpe", "position_embedding")


@dataclass(frozen=True)
class SharedParts:
    """What context parallelism does with the modules of a model.

    Attributes:
        attention: Names of the attention modules that compute over a shared sequence.
        gathered: Names of the modules that get full sequences.
        blocks: Names of the blocks.
        others: Names of the modules outside of blocks that mix positions, such as those of a tower for images: no text
            may reach them.
        needs_full_inputs: Whether what comes before the blocks may run on full sequences: a model that makes positions,
            masks or biases by itself.
        takes_positions: Whether a call with `position_ids` needs no full inputs.
    """

    attention: tuple[str, ...]
    gathered: tuple[str, ...]
    blocks: tuple[str, ...]
    others: tuple[str, ...]
    needs_full_inputs: bool
    takes_positions: bool


def find_parts(module: nn.Module, models: Sequence[Any], plan: ParallelPlan, gather: Gather) -> SharedParts:
    """Returns what context parallelism does with the modules of a model.

    Args:
        module: Model.
        models: Outermost models of transformers in it.
        plan: Plan of the model, with its blocks and attention.
        gather: `all` to gather all modules that mix positions, `auto` only those whose attention cannot be shared.
    """
    blocks = _stacks(module, plan.block_names(module))
    mixing = [name for block in blocks for name in _mixers(module, block)]
    known = [name for name in plan.attention_names(module) if not _is_inside(name, mixing)]
    mixing += [name for name in known if not any(_is_inside(other, [name]) for other in mixing)]
    shareable = {name: _interface_parts(module, name) for name in mixing}
    own_masks = gather == "all" or any(_has_own_mask(model) for model in models)
    # Attention that is not shared needs masks of full sequences, which attention that is shared does not make.
    foreign = [name for name, parts in shareable.items() if not parts and _reads_masks(module.get_submodule(name))]
    others = _outside(module, blocks)
    tables = [name for name, _ in module.named_modules() if name.rpartition(".")[2] in _TABLES]
    takes_positions = all("position_ids" in inspect.signature(m.base_model.forward).parameters for m in models)
    if own_masks or foreign:
        return SharedParts((), tuple(mixing), tuple(blocks), others, needs_full_inputs=True, takes_positions=False)
    attention = tuple(part for parts in shareable.values() for part in parts)
    gathered = tuple(name for name, parts in shareable.items() if not parts)
    return SharedParts(attention, gathered, tuple(blocks), others, not takes_positions or bool(tables), takes_positions)


def _stacks(module: nn.Module, blocks: list[str]) -> list[str]:
    """Returns the blocks, with those of further lists of the same class (a model of two stacks)."""
    if not blocks:
        return []
    kinds = {type(module.get_submodule(name)) for name in blocks}
    names = [name for name, part in module.named_modules() if type(part) in kinds or name in blocks]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names if other != name)]


def _mixers(module: nn.Module, block: str) -> list[str]:
    """Returns the outermost modules of a block that mix positions; a module that only holds some is left out."""
    root = module.get_submodule(block)
    parts = {name: part for name, part in root.named_modules() if name}
    stateful = [name for name, part in parts.items() if is_stateful(part)]
    innermost = [name for name in stateful if not any(_is_inside(other, [name]) for other in stateful if other != name)]
    chosen = {name for name in stateful if name in innermost or "Attention" in type(parts[name]).__name__}
    for name, part in parts.items():
        parent = name.rpartition(".")[0]
        if isinstance(part, _CONVOLUTIONS) and not _is_inside(name, chosen):
            chosen.add(parent or name)
    outermost = [name for name in chosen if not _is_inside(name, chosen - {name})]
    if not outermost and is_stateful(root):
        return [block]  # The block itself is the module, such as one without parts that take states.
    return [f"{block}.{name}" for name in parts if name in outermost]


def is_stateful(module: nn.Module) -> bool:
    """Returns whether a module's forward takes a cache, a state or a mask."""
    return any(name in (*_STATES, _MASK) for name in inspect.signature(module.forward).parameters)


def _is_inside(name: str, others: Any) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others)


def _outside(module: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """Returns the innermost modules outside of blocks that take a cache, a state or a mask."""
    around = {block.rsplit(".", up)[0] for block in blocks for up in range(1, block.count(".") + 1)}
    stateful = [
        name
        for name, part in module.named_modules()
        if name and name not in around and is_stateful(part) and not _is_inside(name, blocks)
        if "Embedding" not in type(part).__name__  # Positions are counted by a mask; see `needs_full_inputs`.
    ]
    holders = {name.rsplit(".", up)[0] for name in stateful for up in range(1, name.count(".") + 1)}
    return tuple(name for name in stateful if name not in holders)


def _reads_masks(part: nn.Module) -> bool:
    """Returns whether a module may read a mask `[B, 1, L, L]`: attention, but not one that is a recurrence."""
    if any("ALL_ATTENTION_FUNCTIONS" in _code_names(type(inner)) for inner in part.modules()):
        return True
    takes_mask = any(_MASK in inspect.signature(inner.forward).parameters for inner in part.modules())
    return takes_mask and "Attention" in type(part).__name__ and not _convolves(part)


def _convolves(part: nn.Module) -> bool:
    return any(isinstance(inner, _CONVOLUTIONS) for inner in part.modules())


def _interface_parts(module: nn.Module, name: str) -> list[str]:
    """Returns the modules in a mixing module, or itself, that compute through transformers' AttentionInterface.

    An empty list if it mixes positions in other ways too.
    """
    root = module.get_submodule(name)
    parts = {f"{name}.{inner}" if inner else name: part for inner, part in root.named_modules()}
    attentions = [] if _convolves(root) else [full for full, part in parts.items() if _uses_interface(part)]
    around = [full for full in parts if any(_is_inside(one, [full]) for one in attentions)]
    mixes = any(
        is_stateful(part) and full not in (name, *around)
        for full, part in parts.items()
        if not _is_inside(full, attentions)
    )
    return [] if mixes else attentions


def _uses_interface(part: nn.Module) -> bool:
    """Returns whether a module's code calls the attention that its model's config names."""
    if attention_implementation(part) is None or is_bidirectional(part):  # Its mask alone makes the latter causal.
        return False
    if not is_stateful(part) and "Attention" not in type(part).__name__:
        return False
    if not type(part).__module__.startswith("transformers."):
        return True  # transformers decides when the implementation is set, and attention checks that it was.
    return "ALL_ATTENTION_FUNCTIONS" in _code_names(type(part))


def _code_names(kind: type[nn.Module]) -> set[str]:
    code = _forward_code(kind)
    return set() if code is None else {*code.co_names, *code.co_freevars}


def _forward_code(kind: type[nn.Module]) -> CodeType | None:
    """Returns the code of a class's forward, without wrappers; None of one that is not written in Python."""
    forward = inspect.unwrap(kind.forward)
    return forward.__code__ if isinstance(forward, FunctionType) else None


def _has_own_mask(model: Any) -> bool:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - _SHAREABLE) or config.model_type in _OWN_MASKS


class GatheredModules:
    """Gathers and cuts sequences at the modules of a model.

    Args:
        sequence: Shared sequence of the model.

    Attributes:
        is_off: Whether modules run on what they get, on full sequences of one rank.
    """

    def __init__(self, sequence: ContextSequence) -> None:
        self.sequence, self.is_off = sequence, False
        self._takes_positions = self._made_full = False

    def __deepcopy__(self, memo: dict[int, Any]) -> GatheredModules:
        return self

    def install(self, module: nn.Module, parts: SharedParts, models: Sequence[nn.Module]) -> None:
        """Changes a model in place: hooks, and `forward` on the objects, so that names and types do not change.

        Args:
            module: Model.
            parts: Attention, gathered modules and blocks of the model.
            models: Models of transformers that hold blocks, the outermost ones and those inside.
        """
        for name in parts.gathered:
            part: Any = module.get_submodule(name)
            names = list(inspect.signature(part.forward).parameters)
            place = names.index(_MASK) if _MASK in names else None
            run = functools.partial(self._run_full, part.forward, type(part).__name__, place)
            part.forward = functools.update_wrapper(run, part.forward)
        for name in parts.others:
            module.get_submodule(name).register_forward_pre_hook(self._refuse)
        if not parts.needs_full_inputs:
            return
        self._takes_positions = parts.takes_positions
        for model in models:
            model.register_forward_pre_hook(self._gather_inputs, with_kwargs=True)
        for name in parts.attention:
            module.get_submodule(name).register_forward_pre_hook(self._cut_arguments, with_kwargs=True)
        reshaping = [model for model in models if _reshapes(model)]
        if reshaping:
            module.get_submodule(parts.blocks[-1]).register_forward_hook(self._gather_output)
        for model in reshaping:
            model.register_forward_hook(self._cut_output)
        mixing = (*parts.attention, *parts.gathered)
        for block in (block for block in parts.blocks if block not in mixing):
            root = module.get_submodule(block)
            root.register_forward_pre_hook(self._cut_hidden, with_kwargs=True)
            for child in _without_mixing(root, block, mixing):
                child.register_forward_pre_hook(self._cut_arguments, with_kwargs=True)

    @contextlib.contextmanager
    def switched_off(self) -> Iterator[None]:
        """Makes the modules run on what they get inside the block."""
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Positions of this rank and of the full sequence; None where nothing is shared.

        Raises:
            DloError: If no batch has been sharded.
        """
        if self.is_off:
            return None
        documents = self.sequence.current
        if documents is None:
            raise DloError(UNSHARDED)
        return documents.length // self.sequence.ring.size, documents.length

    def _gather_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gives a model full inputs."""
        if self.lengths is None:
            return None
        self._made_full = not self._takes_positions or kwargs.get("position_ids") is None
        return self.gather((args, kwargs)) if self._made_full else None

    def _cut_hidden(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cuts a block's first input to this rank's positions, and the states that flow beside it."""
        hidden = _first_tensor(args, kwargs)
        if self.lengths is None or hidden is None:
            return None

        def cut(value: Any) -> Any:
            is_state = isinstance(value, Tensor) and value.ndim > 2 and value.shape[-1] == hidden.shape[-1]
            return self.cut(value) if is_state else value

        return tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}

    def _gather_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Gathers what the last block returns, for a model that reshapes it to the sizes of its inputs."""
        return None if self.lengths is None or not self._made_full else self.gather(output)

    def _cut_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if self.lengths is None or not self._made_full else self.cut(output)

    def _refuse(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.lengths is not None:
            raise DloError(
                "modules that mix positions must be inside the plan's blocks for context parallelism, got"
                f" {type(module).__name__} outside of them; name its blocks in Task.parallel_plan, or set cp=1"
            )

    def _cut_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cuts all arguments of a module to this rank's positions."""
        return None if self.lengths is None else self.cut((args, kwargs))

    def gather(self, value: Any) -> Any:
        """Returns the full tensors of an argument's shards; full ones and others do not change."""
        assert self.lengths is not None
        own, length = self.lengths
        return self._change(value, own, length, lambda tensor, dim: _gather(tensor, dim, self.sequence.ring))

    def cut(self, value: Any) -> Any:
        """Returns this rank's shards of the full tensors of an argument; others do not change."""
        assert self.lengths is not None
        (own, length), ring = self.lengths, self.sequence.ring
        return self._change(value, length, own, lambda x, dim: shard_sequence(x, ring.rank, ring.size, dim))

    def _change(self, value: Any, length: int, other: int, change: Callable[[Tensor, int], Tensor]) -> Any:
        """Returns an argument with all its tensors of a length changed along the dim of their positions."""

        def changed(tensor: Tensor) -> Tensor:
            dim = _dim_of(tensor, length, other, self.sequence.rows)
            return tensor if dim is None else change(tensor, dim)

        return tree_map_only(Tensor, changed, value)

    def _run_full(self, forward: Callable[..., Any], name: str, place: int | None, *args: Any, **kwargs: Any) -> Any:
        """Runs a module's forward on full sequences, and returns this rank's positions.

        Args:
            forward: Forward of the module.
            name: Name of its class, for the error.
            place: Number of its argument for the mask of padding; None without one.
            *args: Arguments of the forward.
            **kwargs: Keyword arguments of the forward.
        """
        if self.lengths is None:
            return forward(*args, **kwargs)
        own, length = self.lengths
        hidden = _first_tensor(args, kwargs)
        if hidden is not None and not {own, length} & set(hidden.shape[:2]):
            raise DloError(
                f"activations must have all {own} tokens of this rank's shard in {name}, which gathers"
                f" them under context parallelism, got {list(hidden.shape)}; set sequence_parallel: false"
            )
        is_placed = place is not None and place < len(args)
        mask = args[place] if is_placed else kwargs.get(_MASK)  # type: ignore[index]
        if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == own):
            # The mask of padding of all ranks: a rank without padding may have left it out.
            real = self.sequence.current.real if self.sequence.current is not None else None
            padding = None if real is None else real.long()
            if is_placed:
                args = (*args[:place], padding, *args[place + 1 :])  # type: ignore[operator]
            elif _MASK in kwargs:
                kwargs = {**kwargs, _MASK: padding}
        args, kwargs = self.gather((args, kwargs))
        return self.cut(forward(*args, **kwargs))


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def _gather(x: Tensor, dim: int, ring: Ring) -> Tensor:
    """Returns the full tensor of all ranks' shards; backward sums the gradient over the ranks and keeps this rank's."""

    def run(x: Tensor) -> Tensor:
        sent = x.movedim(dim, 0)
        parts = ring.all_gather_parts(sent.to(torch.uint8) if x.dtype == torch.bool else sent)
        # Contiguous, as a single process has it: code of models makes views of it.
        return concat_shards(list(parts), 0).movedim(0, dim).to(x.dtype).contiguous()

    def back(grad: Tensor) -> Tensor:
        full = grad.movedim(dim, 0)
        parts = torch.stack([shard_sequence(full, rank, ring.size, 0) for rank in range(ring.size)])
        return ring.reduce_scatter_parts(parts).movedim(0, dim).contiguous()

    return with_backward(x, run, back)


def _dim_of(tensor: Tensor, length: int, other: int, rows: int) -> int | None:
    """Returns the dim of a tensor's positions: 1, or 0 for [L, B, D]; None for another kind of tensor."""
    if tensor.ndim < 2:
        return None
    is_mask = tensor.ndim == 4 and tensor.shape[-2:] == (length, length)
    if tensor.shape[1] == length and tensor.shape[0] in (1, rows) and not is_mask:
        return 1
    is_by_position = tensor.ndim == 3 and tensor.shape[0] == length and tensor.shape[1] == rows
    return 0 if is_by_position and rows not in (length, other) else None


def _reshapes(model: nn.Module) -> bool:
    """Returns whether a model's forward gives its result the sizes of its inputs, as those after GPT do."""
    code = _forward_code(type(model))
    return code is not None and "output_shape" in code.co_varnames


def _without_mixing(part: nn.Module, name: str, mixing: Sequence[str]) -> list[nn.Module]:
    """Returns the largest modules inside a block, itself not among them, that neither mix positions nor hold others."""
    modules: list[nn.Module] = []
    for inner, child in part.named_children():
        full = f"{name}.{inner}"
        if any(other.startswith(f"{full}.") for other in mixing):
            modules += _without_mixing(child, full, mixing)
        elif full not in mixing:
            modules.append(child)
    return modules
