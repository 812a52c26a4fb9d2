"""Grids of levels: scales of tensors, rounding to the levels, and the gradient of rounding.

Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference. Jacob et al., 2017,
arXiv 1712.05877. The gradient passes the rounding unchanged, and is 0 where a value is outside the grid: Estimating or
Propagating Gradients Through Stochastic Neurons. Bengio, Léonard & Courville, 2013, arXiv 1308.3432.

The arithmetic and its order are torchao's, so that a trained weight has the level that the conversion gives it.
Symmetric grids reach from the least to the largest value (torchao's ``SYMMETRIC_NO_CLIPPING_ERR``). torchao's default
divides the largest magnitude by 127.5, so that it is in the middle of two levels: its level, and with it the loss, then
depends on the last bit of the value, and a run would not equal that of another strategy.

Two departures in the gradient. The first and the last level belong to the grid, as in torch's own fake quantisation;
torchao uses ``torch.clamp``, which passes no gradient there in torch 2.14, so that the largest weight of each row would
never train. For ``float8``, torchao also passes a gradient through the scale to the largest element.

Shapes: [..., K] values; K = G groups of S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Least scale of a symmetric grid, for a row of zeros.
_LEAST = torch.finfo(torch.float32).eps
#: Least range of a group of an affine grid.
_LEAST_RANGE = 1e-6
_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Grid:
    """Grid of levels of a tensor.

    Attributes:
        scale: Distance of two levels, [..., G, 1].
        offset: Value of the middle level, [..., G, 1]; None for 0.
        bits: Bits of a level; 0 for float8.
    """

    scale: Tensor
    offset: Tensor | None
    bits: int

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest level."""
        if not self.bits:
            return -torch.finfo(_FLOAT8).max, torch.finfo(_FLOAT8).max
        if self.offset is not None:
            return 0, 2**self.bits - 1
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    @property
    def middle(self) -> float:
        """Level of the offset."""
        return 2 ** (self.bits - 1) if self.offset is not None else 0


def symmetric_grid(x: Tensor, bits: int, joined: Callable[[Tensor], Tensor] | None = None) -> Grid:
    """Returns the symmetric grid of each row.

    Args:
        x: Values, [..., K].
        bits: Bits of a level.
        joined: Function that returns the maximum of a tensor over ranks that have slices of the rows.
    """
    scale = symmetric_scale(x, bits)
    return grid_of_scale(scale if joined is None else joined(scale), bits)


def symmetric_scale(x: Tensor, bits: int) -> Tensor:
    """Returns the least scale by which each row's values are within its symmetric grid, [..., 1]."""
    low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
    return torch.maximum(low.clamp(max=0) / -float(2 ** (bits - 1)), high.clamp(min=0) / float(2 ** (bits - 1) - 1))


def grid_of_scale(scale: Tensor, bits: int) -> Grid:
    """Returns the symmetric grid of rows with known scales, [..., 1]."""
    return Grid(scale.clamp(min=_LEAST).float().unsqueeze(-1), None, bits)


def affine_grid(x: Tensor, bits: int, group_size: int) -> Grid:
    """Returns the affine grid of each group of a row, [..., K]."""
    grouped = x.unflatten(-1, (-1, group_size))
    low, high = grouped.amin(dim=-1, keepdim=True), grouped.amax(dim=-1, keepdim=True)
    scale = ((high - low) / float(2**bits - 1)).clamp(min=_LEAST_RANGE)
    return Grid(scale, low + scale * 2 ** (bits - 1), bits)


def float8_grid(x: Tensor, joined: Callable[[Tensor], Tensor] | None = None) -> Grid:
    """Returns the grid of float8 numbers (e4m3) of each row, [..., K]; `joined` as in :func:`symmetric_grid`."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    if joined is not None:
        largest = joined(largest)
    least = torch.finfo(torch.float32).tiny  # torchao divides a row of zeros by 0.
    return Grid((largest / torch.finfo(_FLOAT8).max).float().clamp(min=least).unsqueeze(-1), None, 0)


def _in_groups(x: Tensor, grid: Grid) -> Tensor:
    return x.unflatten(-1, (grid.scale.shape[-2], -1))


def _levels(grouped: Tensor, grid: Grid) -> Tensor:
    """Returns the rounded levels, not limited to the grid; in float8 they are not rounded."""
    if not grid.bits:
        return grouped.float() / grid.scale
    if grid.offset is None:
        return torch.round(grouped * (1.0 / grid.scale))
    return torch.round((grouped - (grid.offset - grid.scale * grid.middle)) / grid.scale)


def levels(x: Tensor, grid: Grid) -> Tensor:
    """Returns the levels of values, [..., K], as whole numbers in a float dtype."""
    return _levels(_in_groups(x, grid), grid).clamp(*grid.bounds).flatten(-2)


def fake_quantise(x: Tensor, grid: Grid) -> Tensor:
    """Returns the values of the nearest levels, [..., K], in the dtype of `x`."""
    found = _levels(_in_groups(x, grid), grid).clamp(*grid.bounds)
    if not grid.bits:
        found = found.to(_FLOAT8).float() * grid.scale
    elif grid.offset is None:
        found = found.to(x.dtype) * grid.scale
    else:
        found = (found - grid.middle).to(x.dtype) * grid.scale + grid.offset
    return found.flatten(-2).to(x.dtype)


def rounding_gradient(x: Tensor, grid: Grid, gradient: Tensor) -> Tensor:
    """Returns the gradient of :func:`fake_quantise` with respect to `x`; the grid counts as a constant."""
    rounded, scaled = _levels(_in_groups(x, grid), grid), _in_groups(gradient, grid) * grid.scale
    low, high = grid.bounds
    inside = scaled * ((rounded >= low) & (rounded <= high))
    found = inside * (1.0 / grid.scale) if grid.bits and grid.offset is None else inside / grid.scale
    return found.flatten(-2).to(x.dtype)


class _Round(torch.autograd.Function):
    """Rounding whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def traced_fake_quantise(x: Tensor, grid: Grid) -> Tensor:
    """Returns :func:`fake_quantise` of `x` by differentiable operations, for torch.compile."""
    grouped = _in_groups(x, grid)
    if not grid.bits:
        inside = _limit(grouped.float() / grid.scale, grid)
        found = (inside + (inside.to(_FLOAT8).float() - inside).detach()) * grid.scale
    elif grid.offset is None:
        found = _limit(_Round.apply(grouped * (1.0 / grid.scale)), grid).to(x.dtype) * grid.scale
    else:
        rounded = _Round.apply((grouped - (grid.offset - grid.scale * grid.middle)) / grid.scale)
        found = (_limit(rounded, grid) - grid.middle).to(x.dtype) * grid.scale + grid.offset
    return found.flatten(-2).to(x.dtype)


def _limit(rounded: Tensor, grid: Grid) -> Tensor:
    """Returns the levels within the grid; the first and the last level pass their gradient."""
    low, high = grid.bounds
    return torch.where((rounded >= low) & (rounded <= high), rounded, rounded.detach().clamp(low, high))
