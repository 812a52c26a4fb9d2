"""Placeholders of earlier stages' values, and the check that a stage uses none of them.

A stage has placeholders in place of the outputs of earlier stages, so that the code before its blocks runs. That is
right as long as nothing is computed from them after the hidden state has been received. What is computed from a
placeholder is one too. Operations on other tensors are not watched, so that the check costs nothing, and runs always.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from dlo_framework.errors import DloError

#: Operations that use only a tensor's shape, dtype and device.
_SHAPE_ONLY = ("_like", "new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")
#: Operations that return a tensor's value as a Python number.
_NUMBERS = ("_local_scalar_dense", "item", "is_nonzero", "equal")


class SkipCheck:
    """State of one forward of a stage, which its placeholders share.

    Args:
        model: Model that runs.

    Attributes:
        place: Name of the block that was called last, for messages.
        is_received: Whether the hidden state has been received, so that placeholders must not be used.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.place, self.is_received = model, "", False

    def check_values(self, values: Any, what: str) -> None:
        """Checks that values hold no placeholder.

        Args:
            values: Tensors, or lists, tuples, dicts and dataclasses of them.
            what: Values in words, for the message.

        Raises:
            DloError: One of them is a placeholder.
        """
        for tensor in tensors_in(values):
            if isinstance(tensor, Placeholder):
                raise DloError(_message(what, tensor.source))


class Placeholder(Tensor):
    """Tensor of an earlier stage, of which this stage has the shape and the dtype, and no value: it is NaN or zero.

    Args:
        value: Tensor of its shape, dtype and device.
        source: Name of the module or parameter that it depends on.
        check: State of the forward.
    """

    value: Tensor
    source: str
    check: SkipCheck
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor, source: str, check: SkipCheck) -> Placeholder:
        """Returns a tensor without memory of its own."""
        made: Any = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device, layout=value.layout
        )
        made.value, made.source, made.check = value, source, check
        return made

    def __deepcopy__(self, memo: Any) -> Placeholder:
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Computes an operation on placeholders, whose results are placeholders.

        Raises:
            DloError: The hidden state has been received, or the result would be used outside of this check.
        """
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        used = {id(tensor.value): tensor for tensor in tensors if isinstance(tensor, Placeholder)}
        first = next(iter(used.values()))
        check, by_shape = first.check, name.endswith(_SHAPE_ONLY)
        if not by_shape and check.is_received:
            raise DloError(_message(f"'{name}' after '{check.place}' on a value", first.source))
        if name in _NUMBERS:
            raise DloError(_message("a Python number", first.source))
        values = tree_map_only(Placeholder, lambda tensor: tensor.value, (args, kwargs))
        found = func(*values[0], **values[1])
        if by_shape:
            return found
        others = {id(tensor) for tensor in tensors}

        def wrapped(tensor: Tensor) -> Tensor:
            if id(tensor) not in others:
                return used[id(tensor)] if id(tensor) in used else cls(tensor, first.source, check)
            buffer = next((key for key, buffer in check.model.named_buffers() if buffer is tensor), None)
            if buffer is not None:
                raise DloError(_message(f"buffer '{buffer}'", first.source))
            return tensor  # It has been written to, and now holds NaN.

        return tree_map_only(Tensor, wrapped, found)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(list(vars(value).values()))


def _message(what: str, source: str) -> str:
    return (
        f"a pipeline stage must use nothing of earlier stages but the hidden state, got {what} computed from"
        f" '{source}', which is in an earlier stage; keep both in one stage (split), or train with pp=1"
    )
