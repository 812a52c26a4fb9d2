"""Which units a step uses outside their own forward: a penalty on all weights, a head that is a block's transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

#: What can be asked of a parameter whose memory is gone.
_NOT_VALUES = {"__hash__", "__len__", "__set__", "__delete__", "data_ptr", "dim", "element_size", "get_device"}
_NOT_VALUES |= {"is_complex", "is_contiguous", "is_floating_point", "is_pinned", "is_shared", "is_signed", "ndimension"}
_NOT_VALUES |= {"nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size"}
_NOT_VALUES |= {"storage_offset", "stride", "untyped_storage"}
#: Attributes that are tensors; all others tell of shape, type and place.
_TENSORS = {"data", "T", "H", "mT", "mH", "real", "imag"}


class OutsideUse(TorchFunctionMode):
    """Calls ``found`` with the id of each parameter just before its values are used.

    It sees every function of torch's that is called on a tensor, which costs a few microseconds each: one step is
    watched, those that follow do the same.

    Args:
        watched: ids of the parameters.
        found: called before the function runs.
    """

    def __init__(self, watched: set[int], found: Callable[[int], None]) -> None:
        super().__init__()
        self.watched, self.found = watched, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Looks at the arguments, and calls the function."""
        kwargs = kwargs or {}
        if uses_values(func):
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self.watched:
                    self.found(id(leaf))
        return func(*args, **kwargs)


def uses_values(function: Any) -> bool:
    """Whether a function of torch's, as ``__torch_function__`` is given it, may read or write a tensor's values."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(getattr(function, "__self__", None), "__name__", "") in _TENSORS
    return name not in _NOT_VALUES


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has compiled any part of a module: a mode would have it compile once more without."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())
