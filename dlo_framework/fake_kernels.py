"""Models on fake tensors, and kernels for operators that models use and torch's `FakeTensorMode` does not support.

A value that a forward reads, for an assertion or a branch, is 0 or False here, as fake tensors have no values. If that
takes another branch of the forward, it does so on one rank as on many.

`FakeTensorMode` (torch 2.11 to 2.15) accepts `_grouped_mm`, the product of a mixture's experts, only in half precision
and with strides that are multiples of 16 bytes. The operator itself has these limits only in the newest GPUs' kernel.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Dict of a module, key there, and tensor.
TensorPlace = tuple[dict[str, Any], str, Tensor]
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


class FakeMode(FakeTensorMode):
    """Mode in which new tensors are fake, which looks for devices once: torch (2.11 to 2.15) does at each operator.

    Without a GPU each look loads NVIDIA's library in vain, because Lightning asks for counts by that library.
    """

    @functools.cached_property
    def avoid_device_init(self) -> bool:
        """Whether this machine lacks devices to initialise."""
        return super().avoid_device_init


class _SharedTensors(TorchFunctionMode):
    """Mode in which `copy.deepcopy` does not copy tensors, wherever an object has them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch."""
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Makes tensors inside the block fake: they have shapes and dtypes, and no values."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # torch prints the traceback of each operator that fails.
    try:
        with FakeMode(allow_non_fake_inputs=True), FakeKernels():
            yield
    finally:
        log.setLevel(level)


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


def tensor_places(module: nn.Module) -> Iterator[TensorPlace]:
    """Yields the dicts in which a module's parameters and buffers are, their keys there, and the tensors."""
    for part in module.modules():
        registered: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for entries in registered:
            yield from ((entries, key, tensor) for key, tensor in list(entries.items()) if tensor is not None)


@contextlib.contextmanager
def tensors_replaced(places: Sequence[TensorPlace]) -> Iterator[None]:
    """Sets other tensors in a module's places inside the block.

    Args:
        places: Places as of :func:`tensor_places`, each with the other tensor.
    """
    before = [entries[key] for entries, key, _ in places]
    try:
        for entries, key, tensor in places:
            entries[key] = tensor
        yield
    finally:
        for (entries, key, _), tensor in zip(places, before, strict=True):
            entries[key] = tensor


def copy_modules(module: Any) -> Any:
    """Returns a copy of a module that shares its parameters and buffers, so that it takes no memory."""
    return copy.deepcopy(module, {id(tensor): tensor for _, _, tensor in tensor_places(module)})


def fake_copy(module: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns a copy of a module with fake tensors, in a `FakeTensorMode`; tied tensors stay tied.

    Tensors that are neither parameters nor buffers, such as the states of metrics, are not copied.

    Args:
        module: Module on any device.
        dtype: Dtype of its floating-point tensors; by default their own.
    """
    with _SharedTensors():
        own = copy_modules(module)
    for entries, key, tensor in fake_places(tensor_places(own), dtype):
        entries[key] = tensor
    return own


def fake_places(places: Iterable[TensorPlace], dtype: torch.dtype | None = None) -> list[TensorPlace]:
    """Returns places of a module's tensors with fake tensors like those there; tied tensors stay tied."""
    made: dict[int, Any] = {}
    return [(entries, key, made.setdefault(id(old), fake_like(old, dtype))) for entries, key, old in places]


def fake_like(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns a fake tensor on the CPU for a tensor, in a `FakeTensorMode`; any other value itself.

    Args:
        value: Tensor, whose attributes the fake one gets: optimizers group parameters by them.
        dtype: Dtype of the fake tensor of a floating-point one; by default its own.
    """
    if not isinstance(value, Tensor):
        return value
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    made = torch.empty(value.shape, dtype=wanted, device="cpu")
    made = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
    if not isinstance(value, FakeTensor):  # Fake tensors store their device there.
        made.__dict__.update(value.__dict__)
    return made
