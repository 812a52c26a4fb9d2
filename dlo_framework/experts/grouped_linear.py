"""Linear layers of many experts in one call, of rows that are sorted by expert.

`F.grouped_mm` computes them on an accelerator in bf16. Elsewhere one matrix product per expert writes its slice of the
output. It is one operator to autograd and torch.compile: indexing the stacked weights expert by expert, as
transformers' eager loop does, makes backward write a full gradient of the stack for each expert.

Shapes: S rows, E experts, D input and H output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns each row times the weight of its expert, `[S, H]`; rows after the last expert's give 0.

    Args:
        rows: Rows in the order of experts, `[S, D]`.
        weight: Weights, `[E, H, D]`.
        counts: Number of rows of each expert, `[E]`, integers; their sum is at most S.
        bias: Biases, `[E, H]`.
    """
    kind = rows.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if has_grouped_kernel(rows, weight):
        return _by_grouped_mm(rows, weight, counts, bias)
    found: Tensor = _product(rows, weight, counts, bias)
    return found


def has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Returns whether `F.grouped_mm` computes these: in bf16 on CUDA, with rows of multiples of 16 bytes."""
    return (
        rows.is_cuda
        and rows.dtype == weight.dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
    )


def _by_grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the product without a wait for the device; `F.grouped_mm` does not write rows after the last expert."""
    ends = counts.cumsum(0)
    place = torch.arange(len(rows), device=rows.device)
    inside = (place < ends[-1])[:, None]
    output = F.grouped_mm(rows.masked_fill(~inside, 0), weight.mT, offs=ends.to(torch.int32))
    if bias is not None:
        output = output + bias[torch.searchsorted(ends, place, right=True).clamp(max=len(bias) - 1)]
    return output.masked_fill(~inside, 0)


@torch.library.custom_op("dlo::grouped_linear", mutates_args=())
def _product(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    output = rows.new_empty(len(rows), weight.shape[1])
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            part, into = rows[first : first + count], output[first : first + count]
            if bias is None:
                torch.mm(part, weight[expert].T, out=into)
            else:
                torch.addmm(bias[expert], part, weight[expert].T, out=into)
            first += count
    output[first:] = 0
    return output


@torch.library.custom_op("dlo::grouped_linear_backward", mutates_args=())
def _gradients(
    gradient: Tensor, rows: Tensor, weight: Tensor, counts: Tensor, bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_rows, of_weight = torch.empty_like(rows), torch.empty_like(weight)
    of_bias = weight.new_zeros(weight.shape[:2] if bias else (0,))
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if not count:
            of_weight[expert] = 0
            continue
        span = slice(first, first + count)
        torch.mm(gradient[span], weight[expert], out=of_rows[span])
        torch.mm(gradient[span].T, rows[span], out=of_weight[expert])
        if bias:
            torch.sum(gradient[span], 0, out=of_bias[expert])
        first += count
    of_rows[first:] = 0
    return of_rows, of_weight, of_bias


@_product.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_gradients.register_fake
def _(gradient: Tensor, rows: Tensor, weight: Tensor, counts: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    of_bias = weight.new_empty(weight.shape[:2] if bias else (0,))
    return torch.empty_like(rows), torch.empty_like(weight), of_bias


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    rows, weight, counts, bias = inputs
    ctx.save_for_backward(rows, weight, counts)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
    rows, weight, counts = ctx.saved_tensors
    has_bias = ctx.has_bias
    of_rows, of_weight, of_bias = _gradients(gradient.contiguous(), rows, weight, counts, has_bias)
    return of_rows, of_weight, None, of_bias if has_bias else None


_product.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.dlo.grouped_linear)
def _flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: object, **__: object) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.dlo.grouped_linear_backward)
def _backward_flops(
    _: tuple[int, ...], rows: tuple[int, ...], weight: tuple[int, ...], *__: object, **___: object
) -> int:
    return 4 * rows[0] * weight[1] * weight[2]


#: Operators of the products in forward and in backward, as dispatch modes see them.
OPERATORS = (torch.ops.dlo.grouped_linear, torch.ops.dlo.grouped_linear_backward)
