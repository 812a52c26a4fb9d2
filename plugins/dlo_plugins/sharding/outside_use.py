"""Detects parameters that a step uses outside their unit's forward, such as a penalty on all weights or a tied head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

#: Functions that do not read values: they may be called on a parameter whose memory is freed.
_NOT_VALUES = {"__hash__", "__len__", "__set__", "__delete__", "data_ptr", "dim", "element_size", "get_device"}
_NOT_VALUES |= {
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_pinned",
    "is_shared",
    "is_signed",
    "ndimension",
}
_NOT_VALUES |= {"nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size"}
_NOT_VALUES |= {"storage_offset", "stride", "untyped_storage"}
#: Attributes that are tensors; all others describe shape, dtype and device.
_TENSORS = {"data", "T", "H", "mT", "mH", "real", "imag"}


class OutsideUse(TorchFunctionMode):
    """Calls ``on_use`` with the id of each parameter just before its values are used, and whether by its ``data``.

    The mode intercepts every torch function that is called on a tensor, which costs a few microseconds each. So only
    the first step is watched; later steps use the same parameters.

    Args:
        watched: Ids of the parameters.
        on_use: Callback that gets a parameter's id, and whether its ``data`` are read, before the function runs.
    """

    def __init__(self, watched: set[int], on_use: Callable[[int, bool], None]) -> None:
        super().__init__()
        self.watched, self.on_use = watched, on_use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reports the watched parameters among the arguments, and calls the function."""
        kwargs = kwargs or {}
        if uses_values(func):
            by_data = attribute_of(func) == "data"
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self.watched:
                    self.on_use(id(leaf), by_data)
        return func(*args, **kwargs)


def uses_values(function: Any) -> bool:
    """Returns whether a function that ``__torch_function__`` receives may read or write a tensor's values."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return attribute_of(function) in _TENSORS
    return name not in _NOT_VALUES


def attribute_of(function: Any) -> str:
    """Returns the name of the attribute that a function reads or writes; empty for other functions."""
    return str(getattr(getattr(function, "__self__", None), "__name__", ""))
