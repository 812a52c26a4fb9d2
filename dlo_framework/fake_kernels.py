"""Models on fake tensors, and kernels for operators that models use and torch's `FakeTensorMode` does not support.

A value that a forward reads, for an assertion or a branch, is 0 or False here, as fake tensors have no values. If that
takes another branch of the forward, it does so on one rank as on many.

`FakeTensorMode` (torch 2.11 to 2.15) accepts `_grouped_mm`, the product of a mixture's experts, only in half precision
and with strides that are multiples of 16 bytes. The operator itself has these limits only in the newest GPUs' kernel.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Attributes of a module with its tensors and parts.
_REGISTERED = ("_parameters", "_buffers", "_modules")
#: Errors of a forward that cannot run without values; they do not show a fault of the model.
UNSUPPORTED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class FakeKernels(TorchDispatchMode):
    """Mode that computes the shapes of these operators' results, and zeros for values; use it in a `FakeTensorMode`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default:
            return grouped_mm(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            try:
                return func(*args, **kwargs)  # The value of a constant is known.
            except DataDependentOutputException:
                return _zero(args[0].dtype)
        return func(*args, **kwargs)


def _zero(dtype: torch.dtype) -> bool | int | float | complex:
    """Returns Python's zero of a dtype."""
    if dtype.is_complex:
        return 0j
    if dtype.is_floating_point:
        return 0.0
    return False if dtype is torch.bool else 0


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Returns an empty tensor of the shape of `torch.nn.functional.grouped_mm`: G groups of `[M, K] @ [K, N]`.

    Args:
        a: Left operand `[G, M, K]`, or `[M, K]` with the groups one after the other in its rows or columns.
        b: Right operand `[G, K, N]`, or `[K, N]` with the groups one after the other in its rows or columns.
        offs: Ends of the groups `[G]`, if an operand has no group dim.
        bias: Bias; it does not change the shape.
        out_dtype: Dtype of the result; the operands' by default.

    Raises:
        RuntimeError: If the inner dims of the operands differ.
    """
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"grouped_mm needs operands [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")
    shape = [a.shape[-2], b.shape[-1]]
    if a.ndim == b.ndim:  # Groups are along the inner dim of both, or both have a group dim.
        shape = [a.shape[0] if a.ndim == 3 or offs is None else offs.shape[0], *shape]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def fake_copy(module: Any) -> Any:
    """Returns a copy of a module with fake tensors, in a `FakeTensorMode`; tied tensors stay tied.

    Tensors that are neither parameters nor buffers, such as the states of metrics, are not copied.
    """
    shared = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        own_values = {name: value for name, value in vars(part).items() if name not in _REGISTERED}
        shared += [value for value in tree_leaves(own_values) if isinstance(value, Tensor)]
    own = copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
    made: dict[int, Any] = {}
    for part in own.modules():
        for entries in (part._parameters, part._buffers):
            for key, tensor in list(entries.items()):
                if tensor is not None:
                    entries[key] = made.setdefault(id(tensor), fake_like(tensor))
    return own


def fake_like(value: Any) -> Any:
    """Returns a fake tensor on the CPU for a tensor, in a `FakeTensorMode`; any other value itself."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return torch.nn.Parameter(made, value.requires_grad) if isinstance(value, torch.nn.Parameter) else made
