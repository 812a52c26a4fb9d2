"""Operators that torch has no kernel of for fake tensors, and that models train with all the same.

A value that a forward asks for, of an assertion or a branch, is 0 or False: fake tensors have none. Where that leads a
forward elsewhere, it does so on one rank as on many.

`FakeTensorMode` (torch 2.11 to 2.15) knows `_grouped_mm`, the product of a mixture's experts, for half precision and
strides in multiples of 16 bytes alone; the operator itself takes any on every device but the newest GPUs' own kernel.
"""

from __future__ import annotations

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

#: What a forward on fake tensors raises that cannot run without values: it says nothing of the model.
UNSUPPORTED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class FakeKernels(TorchDispatchMode):
    """Computes the shapes of these operators' results, and answers for values; entered inside a `FakeTensorMode`."""

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
        a: `[G, M, K]`, or `[M, K]` with the groups' rows, or columns, one after the other.
        b: `[G, K, N]`, or `[K, N]` likewise.
        offs: `[G]`, where each group ends, if any operand has no dim of groups.
        bias: does not count.
        out_dtype: of the result; the operands' by default.

    Raises:
        RuntimeError: if the operands do not fit each other.
    """
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"grouped_mm needs operands [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")
    shape = [a.shape[-2], b.shape[-1]]
    if a.ndim == b.ndim:  # Groups lie along the inner dim of both, or both have a dim of them.
        shape = [a.shape[0] if a.ndim == 3 or offs is None else offs.shape[0], *shape]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)
