"""Kinds of work in a step, and the kind of each operator and kernel, by its name."""

from __future__ import annotations

import re

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
