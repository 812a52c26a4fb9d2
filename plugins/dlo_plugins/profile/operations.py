"""Kind of each operator and kernel of a step by its name, and the FLOPs and bytes of an operator from what a trace has.

FLOPs are those of :mod:`dlo_framework.costs`: a product runs again on tensors without values. Here a causal mask halves
those of attention, as kernels leave out what it masks.
"""

from __future__ import annotations

import ast
import functools
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlo_framework.batches import tree_leaves
from dlo_framework.costs import OperatorCounter

_log = logging.getLogger(__name__)

MATRIX = "matrix products"
ATTENTION = "attention"
NORMALISATION = "normalisation"
ELEMENTWISE = "elementwise"
COMPILED = "compiled"
COPIES = "copies"
EXPOSED = "collectives, exposed"
OPTIMIZER = "optimizer"
DATA = "data"
HOST = "host"
#: All kinds that add up to a step, in the order of tables. `elementwise` has reductions, lookups and losses too;
#: `compiled` is what Inductor's fused kernels do; `host` is Python, autograd, views, allocation and launches.
KINDS = (MATRIX, ATTENTION, NORMALISATION, ELEMENTWISE, COMPILED, COPIES, EXPOSED, OPTIMIZER, DATA, HOST)
#: Time of collectives while the rank computes; it is beside the sum, not in it.
HIDDEN = "collectives, hidden"

_VIEWS = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "t", "transpose", "permute", "expand", "expand_as", "select",
    "slice", "narrow", "squeeze", "unsqueeze", "unflatten", "flatten", "split", "split_with_sizes", "chunk", "unbind",
    "as_strided", "as_strided_", "detach", "detach_", "alias", "view_as", "swapaxes", "movedim", "numpy_T",
    "result_type", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_",
    "lift_fresh", "resolve_conj", "resolve_neg", "_has_compatible_shallow_copy_type", "item", "_local_scalar_dense",
    "is_nonzero", "requires_grad_", "output_nr", "_version", "is_leaf", "data", "unsafe_chunk", "unsafe_split",
    "record_stream",
}  # fmt: skip
_PATTERNS = (
    (re.compile(r"^(_?c10d|_c10d_functional|record_param_comms|c10d_functional)"), EXPOSED),
    (re.compile(r"scaled_dot_product|flash_att|efficient_attention|_fused_sdp|flex_attention"), ATTENTION),
    (re.compile(r"(layer|batch|group|rms|instance)_norm"), NORMALISATION),
    (
        re.compile(
            r"^(mm|addmm|bmm|baddbmm|addbmm|matmul|linear|einsum|mv|addmv|dot|vdot|_grouped_mm|_scaled_mm"
            r"|_addmm_activation|addmm_|mkldnn_\w+|cudnn_conv\w*|_?conv\w*|thnn_conv\w*|slow_conv\w*|_int_mm|_weight_int\w*)$"
        ),
        MATRIX,
    ),
    (re.compile(r"^(copy_|_to_copy|to|clone|contiguous|cat|stack|_?pin_memory|repeat|_foreach_copy_)$"), COPIES),
)  # fmt: skip
#: Kinds of operators whose inner operators belong to them.
_INHERITED = (ATTENTION, NORMALISATION, COPIES, EXPOSED)
_WITHOUT_WORK = {"torch", "autograd", "profiler", "prims", "inductor", "FSDP", "dlo"}
_IN_ATTENTION = {"bmm", "baddbmm", "softmax", "_softmax", "_softmax_backward_data", "_safe_softmax"}
_ATTENTION_MODULE = re.compile(r"(^|[._])(self_?)?(attn|attention)", re.IGNORECASE)
_KERNELS = (
    (re.compile(r"fmha|flash|attention|sdpa", re.IGNORECASE), ATTENTION),
    (re.compile(r"layer_?norm|batch_?norm|bn_|group_?norm|rms_?norm", re.IGNORECASE), NORMALISATION),
    (re.compile(r"gemm|gemv|cutlass|cublas|xmma|wgrad|dgrad|conv|winograd|splitk|nvjet", re.IGNORECASE), MATRIX),
    (re.compile(r"triton_|^triton"), COMPILED),
    (re.compile(r"copy_kernel|CatArray|direct_copy", re.IGNORECASE), COPIES),
)


def kind_of_operator(name: str, outer: str | None = None, outer_name: str = "", module: str = "") -> str | None:
    """Returns the kind of an operator; None for one without work of its own, such as an annotation.

    Args:
        name: Name in the trace, such as `aten::addmm`.
        outer: Kind of the operator that calls it.
        outer_name: Name of that operator.
        module: Name of the module that runs.
    """
    if outer in _INHERITED or (outer == MATRIX and outer_name != "aten::matmul"):
        return outer
    if name.startswith(("Torch-Compiled Region", "CompiledFunction", "graph_")):
        return COMPILED
    space, _, own = name.partition("::")
    if own and space == "aten":
        if own in _VIEWS:
            return HOST
        if own in _IN_ATTENTION and _ATTENTION_MODULE.search(module):
            return ATTENTION
        return next((kind for pattern, kind in _PATTERNS if pattern.search(own)), ELEMENTWISE)
    if _PATTERNS[0][0].search(name):
        return EXPOSED
    if not own or space in _WITHOUT_WORK:
        return None
    return next((kind for pattern, kind in _PATTERNS if pattern.search(own)), ELEMENTWISE)


def kind_of_kernel(name: str, category: str, launched_by: str | None) -> str:
    """Returns the kind of a kernel or copy of an accelerator.

    Args:
        name: Name of the kernel.
        category: Category in the trace.
        launched_by: Kind of the operator that launched it; None if unknown.
    """
    if category in ("gpu_memcpy", "gpu_memset"):
        return COPIES
    if launched_by not in (None, HOST):
        return str(launched_by)
    return next((kind for pattern, kind in _KERNELS if pattern.search(name)), ELEMENTWISE)


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
