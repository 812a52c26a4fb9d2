"""Modules of a model that get full sequences, while the rest of the model has this rank's shards.

A module that mixes positions in a way that cannot be cut along the sequence is computed in full on each rank: its
inputs are gathered, and of its output each rank keeps its own positions. Backward sums the gradient of the gathered
inputs over the ranks. The result is exact. The module's computation and its activations are not divided by the ranks;
those of all other modules are.

A model that makes positions, masks or biases by itself runs on full inputs up to its first block. Each block cuts its
input to this rank's shard, while positions, masks and biases stay full for the modules that are gathered.

Shapes: B rows, l positions of this rank, L of the full sequence.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_plugins.context.context_sequence import ContextSequence
from dlo_plugins.context.ring import Ring
from dlo_plugins.context.sequence_layout import concat_shards, shard_sequence
from dlo_plugins.context.token_mixing import SharedParts

#: The collectives that torch.compile traces.
_OPS = torch.ops._c10d_functional
_MASK = "attention_mask"


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
            part = module.get_submodule(name)
            part.forward = _GatheredForward(part, self)
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
        for block in parts.blocks:
            if block in mixing:
                continue
            part = module.get_submodule(block)
            part.register_forward_pre_hook(self._cut_hidden, with_kwargs=True)
            for inner, child in _without_mixing(part, block, mixing):
                if inner:
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
        documents = self.sequence.current
        if self.is_off:
            return None
        if documents is None:
            raise DloError(
                "a batch must be sharded before the model's forward under context parallelism, got one that was not;"
                " pass it through shard_batch, or run the model inside `local()`"
            )
        return documents.length // self.sequence.ring.size, documents.length

    def _gather_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gives a model full inputs."""
        if self.lengths is None:
            return None
        has_positions = self._takes_positions and kwargs.get("position_ids") is not None
        self._made_full = not has_positions
        if has_positions:
            return None
        return tuple(map(self.gather, args)), {key: self.gather(value) for key, value in kwargs.items()}

    def _cut_hidden(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cuts a block's first input to this rank's positions, and the states that flow beside it."""
        if self.lengths is None:
            return None
        hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if hidden is None:
            return None

        def cut(value: Any) -> Any:
            is_state = isinstance(value, Tensor) and value.ndim > 2 and value.shape[-1] == hidden.shape[-1]
            return self.cut(value) if is_state else value

        return tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}

    def _gather_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Gathers what the last block returns, for a model that reshapes it to the sizes of its inputs."""
        return None if self.lengths is None or not self._made_full else self.gather(output)

    def _cut_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.lengths is None or not self._made_full:
            return None
        if isinstance(output, Tensor | tuple):
            return self.cut(output)
        for key, value in output.items():
            output[key] = self.cut(value)
        return output

    def _refuse(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.lengths is not None:
            raise DloError(
                "modules that mix positions must be inside the plan's blocks for context parallelism, got"
                f" {type(module).__name__} outside of them; name its blocks in Task.parallel_plan, or set cp=1"
            )

    def _cut_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cuts all arguments of a module to this rank's positions."""
        if self.lengths is None:
            return None
        return tuple(map(self.cut, args)), {key: self.cut(value) for key, value in kwargs.items()}

    def gather(self, value: Any) -> Any:
        """Returns the full tensors of an argument's shards; full ones and others do not change."""
        assert self.lengths is not None
        return _each(value, self._full)

    def cut(self, value: Any) -> Any:
        """Returns this rank's shards of the full tensors of an argument; others do not change."""
        assert self.lengths is not None
        (own_length, full), ring = self.lengths, self.sequence.ring

        def own(tensor: Tensor) -> Tensor:
            dim = _dim_of(tensor, full, own_length, self._rows)
            return tensor if dim is None else shard_sequence(tensor, ring.rank, ring.size, dim)

        return _each(value, own)

    @property
    def _rows(self) -> int:
        return self.sequence.rows

    def _full(self, tensor: Tensor) -> Tensor:
        assert self.lengths is not None
        dim = _dim_of(tensor, *self.lengths, self._rows)
        if dim is None:
            return tensor
        found: Tensor = _Gather.apply(tensor, dim, self.sequence.ring)
        return found


class _GatheredForward:
    """Forward of a module on full sequences, which returns this rank's positions."""

    def __init__(self, module: nn.Module, gathering: GatheredModules) -> None:
        self._of_full, self._gathering, self._name = module.forward, gathering, type(module).__name__
        names = list(inspect.signature(module.forward).parameters)
        self._mask_place = names.index(_MASK) if _MASK in names else None
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gathering = self._gathering
        lengths = gathering.lengths
        if lengths is None:
            return self._of_full(*args, **kwargs)
        hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if hidden is not None and not {lengths[0], lengths[1]} & set(hidden.shape[:2]):
            raise DloError(
                f"activations must have all {lengths[0]} tokens of this rank's shard in {self._name}, which gathers"
                f" them under context parallelism, got {list(hidden.shape)}; set sequence_parallel: false"
            )
        args, kwargs = self._with_mask(args, kwargs)
        full = [gathering.gather(value) for value in args]
        more = {key: gathering.gather(value) for key, value in kwargs.items()}
        return gathering.cut(self._of_full(*full, **more))

    def _with_mask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces the mask of padding, which a rank without padding may have left out, by that of all ranks."""
        place = self._mask_place
        lengths = self._gathering.lengths
        assert lengths is not None
        given = args[place] if place is not None and place < len(args) else kwargs.get(_MASK)
        if given is not None and not (isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] == lengths[0]):
            return args, kwargs
        if place is not None and place < len(args):
            return (*args[:place], self._padding(), *args[place + 1 :]), kwargs
        return (args, {**kwargs, _MASK: self._padding()}) if _MASK in kwargs else (args, kwargs)

    def _padding(self) -> Tensor | None:
        documents = self._gathering.sequence.current
        return None if documents is None or documents.real is None else documents.real.long()


class _Gather(torch.autograd.Function):
    """Full tensor of all ranks' shards; backward sums the gradient over the ranks and keeps this rank's positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ring: Ring) -> Tensor:
        ctx.dim, ctx.ring = dim, ring
        return gather_positions(x, dim, ring)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_positions(grad, ctx.dim, ctx.ring), None, None


def gather_positions(x: Tensor, dim: int, ring: Ring) -> Tensor:
    """Returns the full tensor of all ranks' shards, in the order of the sequence."""
    if x.is_meta:
        return torch.cat([x] * ring.size, dim)
    sent = x.movedim(dim, 0).contiguous()
    sent = sent.to(torch.uint8) if x.dtype == torch.bool else sent
    _count(ring, "gathered", sent.numel())
    found = _OPS.wait_tensor(_OPS.all_gather_into_tensor(sent, ring.size, ring.group_name))
    # Contiguous, as a single process has it: code of models makes views of it.
    return concat_shards(list(found.chunk(ring.size)), 0).movedim(0, dim).to(x.dtype).contiguous()


def sum_positions(grad: Tensor, dim: int, ring: Ring) -> Tensor:
    """Returns this rank's shard of the sum of all ranks' tensors of the full sequence."""
    if grad.is_meta:
        return grad.narrow(dim, 0, grad.shape[dim] // ring.size)
    full = grad.movedim(dim, 0)
    sent = torch.cat([shard_sequence(full, rank, ring.size, 0) for rank in range(ring.size)])
    _count(ring, "gathered_gradients", sent.numel() // ring.size)
    found = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(sent, "sum", ring.size, ring.group_name))
    result: Tensor = found.movedim(0, dim).contiguous()
    return result


def _count(ring: Ring, what: str, elements: int) -> None:
    if not torch.compiler.is_compiling():
        ring.elements[what] += elements


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
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "output_shape" in code.co_varnames


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns an argument with all its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(part, change) for part in value))
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(_each(part, change) for part in value)
    if type(value) is dict:
        return {key: _each(part, change) for key, part in value.items()}
    return value


def _without_mixing(part: nn.Module, name: str, mixing: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Returns the largest modules inside a block, itself not among them, that neither mix positions nor hold others."""
    found: list[tuple[str, nn.Module]] = []
    for inner, child in part.named_children():
        full = f"{name}.{inner}"
        if full in mixing:
            continue
        if any(other.startswith(f"{full}.") for other in mixing):
            found += _without_mixing(child, full, mixing)
        else:
            found.append((full, child))
    return found
