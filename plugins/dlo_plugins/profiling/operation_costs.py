"""FLOPs and bytes of an operator, from the shapes and dtypes that the profiler has recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Bytes of an element, by the name that the profiler gives its dtype.
_SIZES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "short int": 2,
    "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::complex<float>": 8, "c10::complex<double>": 16,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip
_DTYPES = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64"}

#: Place of `is_causal` among the arguments of attention's operators, by a part of their name.
_CAUSAL = (
    ("for_cpu_backward", 7), ("cudnn_attention_backward", 14), ("attention_backward", 11), ("efficient", 6),
    ("cudnn", 6),
)  # fmt: skip

#: Operators whose inner ones, such as a copy of the bias, are parts of the product.
_PRODUCTS = {
    "mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "_int_mm", "mkldnn_linear", "convolution",
    "convolution_backward",
}  # fmt: skip


class Cost(NamedTuple):
    """Work of an operator.

    Attributes:
        flops: Floating-point operations of matrix products, two for a multiply-add; 0 for other operators.
        bytes: Bytes that it reads and writes at least once.
        dtype: Name of the dtype of a product; empty for other operators.
    """

    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = ""


def is_costed_as_one(name: str) -> bool:
    """Returns whether an operator's shapes say all, so that the operators which it calls are not counted."""
    own = name.removeprefix("aten::")
    is_attention = own.startswith("_scaled_dot_product_") and not own.endswith("_math")
    return is_attention or own in _PRODUCTS


def operator_cost(name: str, args: Mapping[str, Any]) -> Cost | None:
    """Returns the cost of an operator; None if its shapes were not recorded.

    Args:
        name: Name of the operator, such as `aten::addmm`.
        args: Arguments of its event in the trace.
    """
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not dims or not types:
        return None
    own = name.removeprefix("aten::")
    tensors = [
        (tuple(shape), kind)
        for shape, kind in zip(dims, types, strict=False)
        if kind in _SIZES and isinstance(shape, list) and not any(isinstance(size, list) for size in shape)
    ]
    if not tensors:
        return _of_lists(dims, args)
    shapes, size = [shape for shape, _ in tensors], _SIZES[tensors[0][1]]
    read = sum(math.prod(shape) * _SIZES[kind] for shape, kind in tensors)
    product = _product(own, shapes, args)
    if product is not None:
        flops, output = product
        return Cost(flops, read + output * size, _DTYPES.get(tensors[0][1], ""))
    largest = max(math.prod(shape) * _SIZES[kind] for shape, kind in tensors)
    if own in ("embedding", "index_select", "gather"):
        rows = math.prod(shapes[-1]) if len(shapes) > 1 else 0
        moved = rows * (math.prod(shapes[0][1:]) if own != "gather" else 1) * size
        return Cost(0.0, 2 * moved + (math.prod(shapes[-1]) * _SIZES[tensors[-1][1]] if len(shapes) > 1 else 0))
    if own in ("sum", "mean", "amax", "max", "argmax", "norm", "linalg_vector_norm"):
        return Cost(0.0, read)
    return Cost(0.0, read + largest)


def _of_lists(dims: Sequence[Any], args: Mapping[str, Any]) -> Cost | None:
    """Returns the bytes of an operator of lists of tensors, such as those of optimizers; each list counts as read."""
    lists = [entry for entry in dims if isinstance(entry, list) and entry and isinstance(entry[0], list)]
    if not lists:
        return None
    elements = sum(math.prod(shape) for shapes in lists for shape in shapes)
    written = sum(math.prod(shape) for shape in lists[0])
    return Cost(0.0, 4.0 * (elements + written))


def _product(own: str, shapes: Sequence[tuple[int, ...]], args: Mapping[str, Any]) -> tuple[float, float] | None:
    """Returns the FLOPs and the elements of the result of a matrix product; None for other operators."""
    if own in ("mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "_int_mm"):
        left, right = shapes[-2:] if own in ("mm", "bmm", "_int_mm") else shapes[1:3]
        if len(left) < 2 or len(right) < 2:
            return None
        result = math.prod(left[:-1]) * right[-1]
        return 2.0 * result * left[-1], result
    if own in ("linear", "mkldnn_linear") and len(shapes) > 1 and len(shapes[1]) == 2:
        return 2.0 * math.prod(shapes[0]) * shapes[1][0], math.prod(shapes[0][:-1]) * shapes[1][0]
    if own == "convolution":
        return _convolution(shapes[0], shapes[1], args, input_at=0)
    if own == "convolution_backward":  # gradient, input, weight
        gradient, source, weight = shapes[:3]
        forward = 2.0 * math.prod(gradient) * math.prod(weight[1:])
        wanted = str(_concrete(args)[-1]) if _concrete(args) else "[True, True, False]"
        parts = [word.strip() == "True" for word in wanted.strip("[]").split(",")]
        wants_input, wants_weight = [*parts, True, True][:2]
        written = math.prod(source) * wants_input + math.prod(weight) * wants_weight
        return forward * (wants_input + wants_weight), written
    if "scaled_dot_product" in own or "_flash_attention" in own or "_efficient_attention" in own:
        if own in ("scaled_dot_product_attention", "_scaled_dot_product_attention_math"):
            return None
        backward = "backward" in own
        query, key, value = shapes[1:4] if backward else shapes[:3]
        if len(query) < 4:
            return None
        batch, heads, length, width = query[0], query[1], query[2], query[3]
        scores = batch * heads * length * key[2]
        at, words = next((at for part, at in _CAUSAL if part in own), 4), _concrete(args)
        causal = 0.5 if len(words) > at and str(words[at]) == "True" else 1.0
        products = 2.0 * scores * (width + value[3]) * causal
        # Scores again, and a gradient for each operand of the two products: five products for forward's two.
        return products * (2.5 if backward else 1.0), math.prod(query) * (3 if backward else 1)
    return None


def _convolution(
    source: tuple[int, ...], weight: tuple[int, ...], args: Mapping[str, Any], input_at: int
) -> tuple[float, float] | None:
    words = _concrete(args)
    if len(words) < 6 or len(source) < 3:
        return None
    spatial = len(source) - 2
    try:
        stride, padding, dilation = (_numbers(words[at], spatial) for at in (3, 4, 5))
        transposed = str(words[6]) == "True"
    except (ValueError, IndexError):
        return None
    if transposed:
        return 2.0 * math.prod(source) * math.prod(weight[1:]), math.prod(source)
    output = [
        (size + 2 * pad - dil * (kernel - 1) - 1) // step + 1
        for size, pad, dil, kernel, step in zip(source[2:], padding, dilation, weight[2:], stride, strict=True)
    ]
    elements = source[0] * weight[0] * math.prod(output)
    return 2.0 * elements * math.prod(weight[1:]), elements


def _concrete(args: Mapping[str, Any]) -> list[Any]:
    return list(args.get("Concrete Inputs") or [])


def _numbers(text: Any, count: int) -> list[int]:
    found = json.loads(str(text))
    values = [int(value) for value in (found if isinstance(found, list) else [found])]
    return values * count if len(values) == 1 else values
