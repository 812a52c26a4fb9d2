"""Linear layers whose three products are of int8 or float8 numbers; weights keep their dtype, names and memory.

The layer stays the same module with the same parameters, and gets another forward. So names, shards, slices of tensor
parallelism and checkpoints do not change. Forward saves the input and no rounded tensor; backward rounds again, from
the parameter that sharding has gathered by then.

Shapes: T tokens, K input features, N output features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dlo_plugins.pipeline.autocast import autocast_dtype, no_autocast
from dlo_plugins.quantisation.rounded_products import multiply_float8, multiply_mx, multiply_rows
from dlo_plugins.quantisation.shared_scales import Role, SlicedDim, shares_maximum
from dlo_plugins.tensor.projections import RowProduct

#: Attribute of a layer with the settings of its products.
_PRODUCTS = "_dlo_products"


def multiply(
    a: Tensor,
    b: Tensor,
    roles: tuple[Role, Role],
    scheme: str,
    emulate: bool,
    sliced: SlicedDim = None,
    group: str = "",
) -> Tensor:
    """Returns `a @ b.T` with both rounded by a scheme, `[M, N]`.

    Args:
        a: Left factor, `[M, K]`.
        b: Right factor, `[N, K]`.
        roles: Roles of the factors.
        scheme: Name of the scheme.
        emulate: Whether the rounded factors are multiplied in single precision.
        sliced: Sliced dim of the layer's weight; None for a full weight.
        group: Name of the process group of tensor parallelism that slices it.
    """
    if scheme == "int8":
        return multiply_rows(a, b, group if shares_maximum(roles, roles[0], sliced, True) else "")
    if scheme == "mxfp8":
        return multiply_mx(a, b, emulate)  # A slice has full blocks.
    return multiply_float8(a, b, roles, scheme == "fp8_rowwise", emulate, sliced, group)


@dataclass(frozen=True)
class _Products:
    """Settings of a layer's products."""

    scheme: str
    weight_gradient: bool
    emulate: bool
    sliced: SlicedDim = None
    group: str = ""


class LowPrecisionForward:
    """Forward of linear layers with rounded factors; installed in layers by :meth:`install`.

    Args:
        scheme: Name of the scheme.
        weight_gradient: Whether the product of the weight's gradient is of rounded factors too.
        emulate: Whether the rounded factors are multiplied in single precision.

    Attributes:
        layers: Layers that it is installed in.
    """

    def __init__(self, scheme: str, weight_gradient: bool = True, emulate: bool = False) -> None:
        self._products = _Products(scheme, weight_gradient, emulate)
        self.layers: list[nn.Module] = []

    def install(self, layer: nn.Module, sliced: SlicedDim = None, group: str = "") -> None:
        """Replaces a layer's forward; of a row projection, its product.

        Args:
            layer: Linear layer.
            sliced: Dim along which tensor parallelism slices its weight; None for a full weight.
            group: Name of the process group that slices it.
        """
        torch.compiler.allow_in_graph(_LowPrecisionLinear)  # Compiled blocks then have no graph break here.
        layer.__dict__[_PRODUCTS] = replace(self._products, sliced=sliced, group=group)
        # A method of a function, which torch.compile (2.11) traces, bound to the layer: so is that of a deep copy.
        layer.__dict__[_attribute(layer)] = MethodType(forward, layer)
        self.layers.append(layer)

    def remove(self) -> None:
        """Restores the forwards of the layers."""
        for layer in self.layers:
            for name in (_attribute(layer), _PRODUCTS):
                layer.__dict__.pop(name, None)
        self.layers = []


def forward(layer: Any, x: Tensor) -> Tensor:
    """Returns a layer's output; without its bias for a row projection, whose output is a partial sum.

    Its name is that of the method which it replaces: a bound method is pickled by its name.
    """
    products: _Products = layer.__dict__[_PRODUCTS]
    dtype = autocast_dtype(x.device.type) or x.dtype
    settings = products.scheme, products.weight_gradient, products.emulate, products.sliced, products.group
    found: Tensor = _LowPrecisionLinear.apply(x, layer.weight, dtype, *settings)
    if layer.bias is None or isinstance(layer, RowProduct):
        return found
    return found + layer.bias.to(found.dtype)


def _attribute(layer: nn.Module) -> str:
    return "product" if isinstance(layer, RowProduct) else "forward"


class _LowPrecisionLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        dtype: torch.dtype,
        scheme: str,
        weight_gradient: bool,
        emulate: bool,
        sliced: SlicedDim,
        group: str,
    ) -> Tensor:
        ctx.save_for_backward(x)
        # Not among the saved tensors: sharding gathers the parameter itself again for backward.
        ctx.weight, ctx.weight_gradient, ctx.settings = weight, weight_gradient, (scheme, emulate, sliced, group)
        with no_autocast(x.device.type):
            found = multiply(x.flatten(0, -2), weight.detach(), ("input", "weight"), *ctx.settings)
            return found.to(dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight.detach()
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)  # [T, N], [T, K]
        of_x = of_weight = None
        with no_autocast(x.device.type):
            if ctx.needs_input_grad[0]:
                found = multiply(rows, weight.t(), ("gradient", "weight"), *ctx.settings)
                of_x = found.to(x.dtype).view_as(x)
            if ctx.needs_input_grad[1] and ctx.weight_gradient:
                of_weight = multiply(rows.t(), inputs.t(), ("gradient", "input"), *ctx.settings)
            elif ctx.needs_input_grad[1]:
                of_weight = rows.t() @ inputs.to(rows.dtype)
        return of_x, None if of_weight is None else of_weight.to(weight.dtype), *(None,) * 6
