"""FLOPs and bytes of an operator, from the shapes and dtypes that the profiler has recorded.

FLOPs are those of :mod:`dlo_framework.costs`: a product runs again on tensors without values. Here a causal mask halves
those of attention, as kernels leave out what it masks.
"""

from __future__ import annotations

import ast
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlo_framework.batches import tree_leaves
from dlo_framework.costs import OperatorCounter

_log = logging.getLogger(__name__)

#: Dtypes by the names that the profiler gives them.
_DTYPES = {
    "float": torch.float32, "double": torch.float64, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.float16,
    "long int": torch.int64, "long": torch.int64, "int": torch.int32, "short int": torch.int16, "short": torch.int16,
    "signed char": torch.int8, "unsigned char": torch.uint8, "bool": torch.bool,
    "c10::complex<float>": torch.complex64, "c10::complex<double>": torch.complex128,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn, "c10::Float8_e5m2": torch.float8_e5m2,
}  # fmt: skip

#: Operators whose inner ones, such as a copy of the bias, are parts of the product.
_PRODUCTS = {
    "mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "_int_mm", "convolution",
    "convolution_backward",
}  # fmt: skip


@dataclass
class Work:
    """Work of an operator, or of several.

    Attributes:
        flops: Floating-point operations of matrix products, two for a multiply-add; 0 for other operators.
        bytes: Bytes that are read and written at least once.
        dtype: Name of the dtype of a product, of several that of the first; empty for other operators.
    """

    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = ""

    def include(self, other: Work) -> None:
        """Adds other work."""
        self.flops, self.bytes = self.flops + other.flops, self.bytes + other.bytes
        self.dtype = self.dtype or other.dtype


def is_costed_as_one(name: str) -> bool:
    """Returns whether an operator's shapes say all, so that the operators which it calls are not counted."""
    own = name.removeprefix("aten::")
    is_attention = own.startswith("_scaled_dot_product_") and not own.endswith("_math")
    return is_attention or own in _PRODUCTS


def operator_cost(name: str, args: Mapping[str, Any]) -> Work | None:
    """Returns the work of an operator; None if its shapes were not recorded.

    Args:
        name: Name of the operator, such as `aten::addmm`.
        args: Arguments of its event in the trace.
    """
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not dims or not types:
        return None
    own = name.removeprefix("aten::")
    tensors = [
        (math.prod(shape) * _DTYPES[kind].itemsize, tuple(shape), _DTYPES[kind])
        for shape, kind in zip(dims, types, strict=False)
        if kind in _DTYPES and isinstance(shape, list) and not any(isinstance(size, list) for size in shape)
    ]
    if not tensors:
        return _of_lists(dims, args)
    read, (_, first, dtype) = sum(size for size, *_ in tensors), tensors[0]
    if is_costed_as_one(name) or own == "linear":
        words = tuple(str(word) for word in args.get("Concrete Inputs") or [])
        flops, elements = _run(own, str(dims), tuple(types), words)
        if flops:
            return Work(flops, read + elements * dtype.itemsize, str(dtype).removeprefix("torch."))
    if own in ("embedding", "index_select", "gather"):
        index = tensors[-1] if len(tensors) > 1 else (0, (0,), dtype)
        moved = math.prod(index[1]) * (math.prod(first[1:]) if own != "gather" else 1) * dtype.itemsize
        return Work(0.0, 2 * moved + index[0])
    if own in ("sum", "mean", "amax", "max", "argmax", "norm", "linalg_vector_norm"):
        return Work(0.0, read)
    return Work(0.0, read + max(size for size, *_ in tensors))


def _of_lists(dims: Sequence[Any], args: Mapping[str, Any]) -> Work | None:
    """Returns the bytes of an operator of lists of tensors, such as those of optimizers; each list counts as read."""
    lists = [entry for entry in dims if isinstance(entry, list) and entry and isinstance(entry[0], list)]
    if not lists:
        return None
    elements = sum(math.prod(shape) for shapes in lists for shape in shapes)
    written = sum(math.prod(shape) for shape in lists[0])
    return Work(0.0, 4.0 * (elements + written))


@functools.lru_cache(4096)
def _run(own: str, dims: str, types: tuple[str, ...], words: tuple[str, ...]) -> tuple[float, int]:
    """Returns the FLOPs of a product, and the elements of its results; zeros where it cannot run from what is recorded.

    Args:
        own: Name of the operator without `aten::`.
        dims: Shapes of its arguments, as text.
        types: Names of their types.
        words: Values of those that are not tensors, as text; empty for others.
    """
    arguments: list[Any] = []
    for place, (shape, kind) in enumerate(zip(ast.literal_eval(dims), types, strict=False)):
        if kind in _DTYPES and shape:
            arguments.append(torch.empty(shape, dtype=_DTYPES[kind], device="meta"))
        else:
            arguments.append(_value(words[place]) if place < len(words) else None)
    operator = getattr(torch.ops.aten, own).default
    schema = operator._schema.arguments
    named = {argument.name: value for argument, value in zip(schema, arguments, strict=False)}
    by_name = {
        argument.name: named[argument.name] for argument in schema if argument.kwarg_only and argument.name in named
    }
    try:
        with OperatorCounter() as counter:
            results = operator(*arguments[: len(named) - len(by_name)], **by_name)
    except Exception as error:  # An argument was not recorded, or the operator has no kernel for such tensors.
        _log.debug("%s: %s", own, error)
        return 0.0, 0
    is_causal = named.get("is_causal") is True
    elements = sum(leaf.numel() for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
    return counter.get_total_flops() * (0.5 if is_causal else 1.0), elements


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return None
