"""Kind of the kernel that an operator runs.

It follows from the operator and from the order of its tensors in memory, never from the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_plugins.planner.kernel_kind import Kind

_aten = torch.ops.aten


def _operators(*names: str) -> frozenset[Any]:
    """Returns operators by name; versions of torch differ in which they have."""
    return frozenset(getattr(_aten, name) for name in names if hasattr(_aten, name))


_OF_KIND: dict[Kind, frozenset[Any]] = {
    "norm": _operators(
        "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
        "_batch_norm_with_update", "_fused_rms_norm",
    ),
    "norm_backward": _operators(
        "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward",
        "cudnn_batch_norm_backward", "batch_norm_backward", "_fused_rms_norm_backward",
    ),
    "softmax": _operators(
        "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "_safe_softmax",
    ),
    "gather": _operators(
        "index", "index_select", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_", "index_add",
        "index_add_", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "embedding",
        "embedding_dense_backward", "nll_loss_forward", "nll_loss_backward", "roll", "flip", "take", "put_",
        "masked_select", "masked_scatter",
    ),
    "reduction": _operators(
        "sum", "mean", "prod", "var", "var_mean", "std", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all",
        "logsumexp", "linalg_vector_norm", "norm", "cumsum", "cumprod",
    ),
    "strided": _operators("cat", "stack", "repeat", "_cat"),
    "activation": _operators(
        "gelu", "gelu_backward", "silu", "silu_backward", "sigmoid", "sigmoid_backward", "tanh", "tanh_backward", "exp",
        "expm1", "log", "log1p", "log2", "erf", "erfinv", "sin", "cos", "tan", "pow", "elu", "elu_backward", "mish",
        "mish_backward", "softplus", "softplus_backward", "log_sigmoid_forward", "log_sigmoid_backward", "logit",
        "native_dropout", "bernoulli", "bernoulli_", "rand_like", "randn_like", "normal_", "uniform_",
    ),
}  # fmt: skip
_BY_OPERATOR: dict[Any, Kind] = {operator: kind for kind, operators in _OF_KIND.items() for operator in operators}
_COPIES = _operators(
    "clone", "copy_", "copy", "_to_copy", "fill_", "fill", "zero_", "zeros", "zeros_like", "new_zeros", "ones",
    "ones_like", "new_ones", "full", "full_like", "new_full", "arange", "slice_backward", "select_backward",
    "slice_scatter", "select_scatter", "constant_pad_nd",
)  # fmt: skip
#: Kinds whose operators take their tensors in any order of memory.
_IN_ORDER: frozenset[Kind] = frozenset({"copy", "pointwise", "activation", "cast"})


def kind_of(operator: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Kind:
    """Returns the kind of the kernel that an operator runs alone.

    Args:
        operator: Operator without its overload.
        inputs: Tensors that it reads.
        outputs: Tensors that it writes.
    """
    kind = _BY_OPERATOR.get(operator)
    if kind is None:
        kind = "pointwise"
        if operator in _COPIES:
            kind = "cast" if any(x.dtype != outputs[0].dtype for x in inputs) else "copy"
    if kind in _IN_ORDER and any(not _same_order(x, outputs[0]) for x in inputs):
        return "strided"
    return kind


def _same_order(one: Tensor, other: Tensor) -> bool:
    """Returns whether the dims of two tensors of one shape have the same order in memory; of other shapes always."""
    if one.shape != other.shape:
        return True
    own, others = one.stride(), other.stride()
    dims = [d for d, size in enumerate(one.shape) if size > 1 and own[d] and others[d]]
    dims.sort(key=lambda d: -others[d])
    strides = [own[d] for d in dims]
    return strides == sorted(strides, reverse=True)
