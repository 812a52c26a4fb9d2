"""Linear layers whose forward rounds weights, and for some schemes the input, to the levels of a scheme.

Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference. Jacob et al., 2017,
arXiv 1712.05877.

The layer stays the same module with the same parameters, and gets another forward; so names, shards, slices of tensor
parallelism and checkpoints do not change. Forward saves the input, the weight itself and the scales; backward rounds
again. A rounded copy of the weights would take the memory of the full model until backward, which sharding avoids.

Under tensor parallelism, a row projection has slices of the rows: the scales of its weight and of its input come from
the maximum over the ranks, in one all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.models.autocast import autocast_dtype, no_autocast
from dlo_plugins.parallel.tensor.projections import RowProduct
from dlo_plugins.quantise.quantised_layers import replaced_method
from dlo_plugins.quantise.schemes import (
    Grid,
    Scheme,
    affine_grid,
    fake_quantise,
    float8_grid,
    grid_of_scale,
    rounding_gradient,
    symmetric_grid,
    symmetric_scale,
    traced_fake_quantise,
)

#: Attribute of a layer with the bits of its weight, where they are not the same in all layers.
_BITS = "rounded_bits"


class FakeQuantiser:
    """Forward of layers with rounded weights and inputs; installed in layers by :meth:`install`.

    Args:
        scheme: Scheme of quantisation.
        group_size: Number of input features of a group.

    Attributes:
        bits: Most bits of a weight in the next forward.
        layers: Layers that it is installed in.
    """

    __name__ = "forward"  # A bound method is pickled by its name.

    def __init__(self, scheme: Scheme, group_size: int) -> None:
        self.scheme, self.group_size = scheme, group_size
        self.bits = scheme.bits
        self.layers: list[nn.Module] = []
        self._before: list[Any] = []

    def install(self, layers: Iterable[nn.Module]) -> None:
        """Replaces the forward of layers; one that is installed already is left alone."""
        for layer in layers:
            if layer in self.layers:
                continue
            name = replaced_method(layer)
            self._before.append(layer.__dict__.get(name))
            # A method bound to the layer: a deep copy of the model binds it to the copied layer.
            layer.__dict__[name] = MethodType(self, layer)
            self.layers.append(layer)

    def remove(self) -> None:
        """Restores the forwards of the layers."""
        for layer, before in zip(self.layers, self._before, strict=True):
            name = replaced_method(layer)
            layer.__dict__.pop(name, None)
            if before is not None:
                layer.__dict__[name] = before
            layer.__dict__.pop(_BITS, None)
        self.layers, self._before = [], []

    def set_bits(self, bits: Sequence[int]) -> None:
        """Sets the bits of each layer's weight in the next forward, in the order of the layers."""
        for layer, own in zip(self.layers, bits, strict=True):
            layer.__dict__[_BITS] = own
        self.bits = max(bits, default=self.bits)

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """Returns the layer's output; without its bias for a row projection, whose output is a partial sum."""
        is_row = isinstance(layer, RowProduct)
        joined = layer.__dict__["tensor_region"].communicator.maximum if is_row else None
        bias = None if is_row else layer.bias
        weight_grid, input_grid = self.grids(x, layer.weight, joined, layer.__dict__.get(_BITS))
        if torch.compiler.is_compiling():
            weight = traced_fake_quantise(layer.weight, weight_grid)
            return F.linear(x if input_grid is None else traced_fake_quantise(x, input_grid), weight, bias)
        result: Tensor = _FakeQuantisedLinear.apply(x, layer.weight, bias, weight_grid, input_grid)
        return result

    @torch.no_grad()
    def grids(
        self,
        x: Tensor,
        weight: Tensor,
        joined: Callable[[Tensor], Tensor] | None = None,
        bits: int | None = None,
    ) -> tuple[Grid, Grid | None]:
        """Returns the grids of a layer's weight, and of its input if that is quantised.

        Args:
            x: Input, [..., K].
            weight: Weight, [N, K].
            joined: Function that returns the maximum over ranks that have slices of K; None for full rows.
            bits: Bits of the weight; None for :attr:`bits`.
        """
        weight, x, bits = weight.detach(), x.detach(), bits or self.bits
        if self.scheme.grid == "float8":
            return float8_grid(weight, joined), float8_grid(x, joined)
        if self.scheme.grid == "affine":
            return affine_grid(weight, bits, self.group_size), None
        if self.scheme.activations is None:
            return symmetric_grid(weight, bits, joined), None
        if joined is None:
            return symmetric_grid(weight, bits), symmetric_grid(x, 8)
        of_rows, of_tokens = symmetric_scale(weight, bits), symmetric_scale(x, 8)
        both = joined(torch.cat([of_rows.float().flatten(), of_tokens.float().flatten()]))
        rows, tokens = both.split([of_rows.numel(), of_tokens.numel()])
        return grid_of_scale(rows.view_as(of_rows), bits), grid_of_scale(tokens.view_as(of_tokens), 8)


class _FakeQuantisedLinear(torch.autograd.Function):
    """Linear layer of a rounded input and weight, which saves neither of the rounded tensors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_grid: Grid, input_grid: Grid | None
    ) -> Tensor:
        """Computes the layer, in autocast's dtype if that is on."""
        kind = x.device.type
        ctx.dtype = autocast_dtype(kind)
        ctx.save_for_backward(x)
        # Not among the saved tensors: sharding gathers the parameter itself again for backward.
        ctx.weight, ctx.bias, ctx.grids = weight, bias, (weight_grid, input_grid)
        with no_autocast(kind):
            rounded_x, rounded = _rounded(x, input_grid, ctx.dtype), _rounded(weight, weight_grid, ctx.dtype)
            return F.linear(rounded_x, rounded, None if bias is None else bias.to(rounded.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Computes the gradients of input, weight and bias."""
        (x,), weight, bias = ctx.saved_tensors, ctx.weight.detach(), ctx.bias
        weight_grid, input_grid = ctx.grids
        of_x = of_weight = of_bias = None
        with no_autocast(x.device.type):
            if ctx.needs_input_grad[0]:
                of_x = (gradient @ _rounded(weight, weight_grid, ctx.dtype)).to(x.dtype)
                if input_grid is not None:
                    of_x = rounding_gradient(x, input_grid, of_x)
            rows = gradient.reshape(-1, gradient.shape[-1])
            if ctx.needs_input_grad[1]:
                inputs = _rounded(x, input_grid, ctx.dtype).reshape(-1, x.shape[-1])
                of_weight = rounding_gradient(weight, weight_grid, (rows.t() @ inputs).to(weight.dtype))
            if bias is not None and ctx.needs_input_grad[2]:
                of_bias = rows.sum(0).to(bias.dtype)
        return of_x, of_weight, of_bias, None, None


def _rounded(x: Tensor, grid: Grid | None, dtype: torch.dtype | None) -> Tensor:
    found = x if grid is None else fake_quantise(x, grid)
    return found if dtype is None else found.to(dtype)
