"""Linear layers whose products are of int8 numbers, in forward and backward; weights keep their dtype.

SwitchBack: Stable and low-precision training for large-scale vision-language models. Wortsman et al., 2023,
arXiv 2304.13013. Departures: all three products are int8 by default, as in torchao's prototype (0.18); scales are per
row of either factor. torchao's is a tensor subclass of the weight, which strategies other than FSDP do not expect.

Shapes: T tokens, K input features, N output features.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_plugins.pipeline.autocast import autocast_dtype, no_autocast
from dlo_plugins.tensor.projections import RowProduct

#: Multiple of each dim that cuBLAS takes for int8; it also takes no fewer than 17 rows.
_CUDA_MULTIPLE, _CUDA_ROWS = 8, 24


class Int8Products:
    """Forward of linear layers with int8 products; installed in layers by :meth:`install`.

    Args:
        weight_gradient: Whether the product of the weight's gradient is int8 too.
    """

    __name__ = "forward"  # A bound method is pickled by its name.

    def __init__(self, weight_gradient: bool) -> None:
        self.weight_gradient = weight_gradient

    def install(self, layer: nn.Module) -> None:
        """Replaces a layer's forward; of a row projection, its product."""
        layer.__dict__["product" if isinstance(layer, RowProduct) else "forward"] = MethodType(self, layer)

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """Returns the layer's output; without its bias for a row projection, whose output is a partial sum."""
        found: Tensor = _Int8Linear.apply(x, layer.weight, self.weight_gradient)
        if layer.bias is None or isinstance(layer, RowProduct):
            return found
        return found + layer.bias.to(found.dtype)


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weight_gradient: bool) -> Tensor:
        ctx.save_for_backward(x)
        # Not among the saved tensors: sharding gathers the parameter itself again for backward.
        ctx.weight, ctx.weight_gradient = weight, weight_gradient
        dtype = autocast_dtype(x.device.type) or x.dtype
        with no_autocast(x.device.type):
            return multiply_rows(x.flatten(0, -2), weight).to(dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight.detach()
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)  # [T, N], [T, K]
        of_x = of_weight = None
        with no_autocast(x.device.type):
            if ctx.needs_input_grad[0]:
                of_x = multiply_rows(rows, weight.t()).to(x.dtype).view_as(x)
            if ctx.needs_input_grad[1] and ctx.weight_gradient:
                of_weight = multiply_rows(rows.t(), inputs.t()).to(weight.dtype)
            elif ctx.needs_input_grad[1]:
                of_weight = (rows.t() @ inputs.to(rows.dtype)).to(weight.dtype)
        return of_x, of_weight, None


def multiply_rows(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b.T` with both rounded to int8, in single precision.

    Args:
        a: Left factor, `[M, K]`; each row has a scale.
        b: Right factor, `[N, K]`; each row has a scale.
    """
    (rounded_a, scales_a), (rounded_b, scales_b) = round_rows(a), round_rows(b)
    if a.device.type == "cuda":
        rounded_a = _pad(rounded_a, max(_CUDA_ROWS, _multiple(len(a))), _multiple(a.shape[1]))
        rounded_b = _pad(rounded_b, _multiple(len(b)), _multiple(b.shape[1]))
    product = torch._int_mm(rounded_a, rounded_b.t())[: len(a), : len(b)]
    return product.float() * scales_a * scales_b.t()


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a matrix in int8, and the scale of each row, `[M, 1]`, in single precision."""
    x = x.detach().float()
    scales = x.abs().amax(1, keepdim=True) / 127
    return (x / scales.masked_fill(scales == 0, 1)).round().to(torch.int8).contiguous(), scales


def _multiple(size: int) -> int:
    return -(-size // _CUDA_MULTIPLE) * _CUDA_MULTIPLE


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(x, (0, columns - x.shape[1], 0, rows - len(x))) if x.shape != (rows, columns) else x
