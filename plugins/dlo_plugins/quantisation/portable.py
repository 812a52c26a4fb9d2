"""Quantised layers of plain torch operations, for ONNX, which has no operators for torchao's kernels.

Weights are stored as int8, or two int4 levels to a byte; the product is of the levels, as floats, and the scales
follow. So a layer gives torchao's result up to the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_plugins.quantisation.grids import affine_grid, levels, symmetric_grid
from dlo_plugins.quantisation.schemes import Scheme


class PortableLinear(nn.Module):
    """Linear layer with a symmetric int8 weight.

    Args:
        layer: Layer with its float weight, [N, K].
        scheme: Scheme of quantisation.
        input_scale: Scale of the input for static activations.
    """

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None

    def __init__(self, layer: nn.Linear, scheme: Scheme, input_scale: Tensor | None) -> None:
        super().__init__()
        grid = symmetric_grid(layer.weight.detach(), scheme.bits)
        self.activations = scheme.activations
        self.register_buffer("weight", levels(layer.weight.detach(), grid).to(torch.int8))
        self.register_buffer("scale", grid.scale.flatten().clone())
        self.register_buffer("input_scale", input_scale)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output, [..., N]."""
        input_scale = self.input_scale
        if self.activations == "dynamic":
            input_scale = symmetric_grid(x, 8).scale.squeeze(-1)
        if input_scale is None:
            found = F.linear(x, self.weight.to(x.dtype)) * self.scale
        else:
            rounded = torch.round(x * (1.0 / input_scale)).clamp(-128, 127)
            found = F.linear(rounded, self.weight.to(x.dtype)) * input_scale * self.scale
        return found if self.bias is None else found + self.bias


class PortableInt4Linear(nn.Module):
    """Linear layer with an int4 weight in groups, two levels to a byte.

    Args:
        layer: Layer with its float weight, [N, K].
        scheme: Scheme of quantisation.
        group_size: Number of input features of a group.
    """

    packed: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, layer: nn.Linear, scheme: Scheme, group_size: int) -> None:
        super().__init__()
        weight = layer.weight.detach()
        grid = affine_grid(weight, scheme.bits, group_size)
        assert grid.offset is not None
        found = levels(weight, grid).to(torch.uint8)
        self.middle = grid.middle
        self.register_buffer("packed", found[:, ::2] + 16 * found[:, 1::2])
        self.register_buffer("scale", grid.scale.clone())
        self.register_buffer("offset", grid.offset.clone())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output, [..., N]."""
        both = self.packed.to(x.dtype)
        high = torch.floor(both / 16)
        found = torch.stack([both - 16 * high, high], dim=-1).flatten(-2)  # [N, K]
        grouped = found.unflatten(-1, (self.scale.shape[-2], -1))
        weight = ((grouped - self.middle) * self.scale + self.offset).flatten(-2)
        return F.linear(x, weight, self.bias)


def make_portable(
    model: nn.Module, names: Sequence[str], scheme: Scheme, group_size: int, input_scales: dict[str, Tensor] | None
) -> None:
    """Replaces layers of a float model by portable ones, in place; arguments as in :func:`.conversion.convert`."""
    for name in names:
        parent, _, own = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        scale = None if input_scales is None else input_scales[name]
        portable: nn.Module = (
            PortableLinear(layer, scheme, scale)
            if not scheme.is_grouped
            else PortableInt4Linear(layer, scheme, group_size)
        )
        setattr(model.get_submodule(parent), own, portable)
