"""Schemes and options of quantisation, their kernels and configs in torchao, and the grids of levels.

A grid has the scales of a tensor, rounds to the levels, and gives the gradient of rounding.

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

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dlo_framework.errors import DloError, check_choice

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
    nearest = _levels(_in_groups(x, grid), grid).clamp(*grid.bounds)
    if not grid.bits:
        values = nearest.to(_FLOAT8).float() * grid.scale
    elif grid.offset is None:
        values = nearest.to(x.dtype) * grid.scale
    else:
        values = (nearest - grid.middle).to(x.dtype) * grid.scale + grid.offset
    return values.flatten(-2).to(x.dtype)


def rounding_gradient(x: Tensor, grid: Grid, gradient: Tensor) -> Tensor:
    """Returns the gradient of :func:`fake_quantise` with respect to `x`; the grid counts as a constant."""
    rounded, scaled = _levels(_in_groups(x, grid), grid), _in_groups(gradient, grid) * grid.scale
    low, high = grid.bounds
    inside = scaled * ((rounded >= low) & (rounded <= high))
    grad_x = inside * (1.0 / grid.scale) if grid.bits and grid.offset is None else inside / grid.scale
    return grad_x.flatten(-2).to(x.dtype)


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
        values = (inside + (inside.to(_FLOAT8).float() - inside).detach()) * grid.scale
    elif grid.offset is None:
        values = _limit(_Round.apply(grouped * (1.0 / grid.scale)), grid).to(x.dtype) * grid.scale
    else:
        rounded = _Round.apply((grouped - (grid.offset - grid.scale * grid.middle)) / grid.scale)
        values = (_limit(rounded, grid) - grid.middle).to(x.dtype) * grid.scale + grid.offset
    return values.flatten(-2).to(x.dtype)


def _limit(rounded: Tensor, grid: Grid) -> Tensor:
    """Returns the levels within the grid; the first and the last level pass their gradient."""
    low, high = grid.bounds
    return torch.where((rounded >= low) & (rounded <= high), rounded, rounded.detach().clamp(low, high))


#: Sizes of groups that torchao's int4 kernels take, on a CPU and on CUDA.
GROUP_SIZES = (32, 64, 128)
#: Divisor of the output features that torchao's int4 kernel takes on a CPU.
INT4_ROWS = 16
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Kernels:
    """Kernels of a scheme.

    Attributes:
        name: Name of the scheme in configs.
        text: Description for tables and messages.
        capability: Least compute capability of a CUDA device with its kernels.
        devices: Types of device with kernels.
    """

    name: str
    text: str
    capability: tuple[int, int]
    devices: tuple[str, ...]

    def lacks(self, device: torch.device) -> str:
        """Returns what a device lacks for the scheme; empty if it has kernels for it."""
        if device.type not in self.devices:
            return f"{device.type}, which has no kernels for it"
        if device.type == "cuda" and torch.version.hip is None:  # torch's own error names another architecture.
            capability = torch.cuda.get_device_capability(device)
            if capability < self.capability:
                return f"compute capability {capability[0]}.{capability[1]}"
        return ""

    def check(self, callback: str, device: torch.device, others: Iterable[Kernels], also: str = "") -> None:
        """Checks that a device has kernels for the scheme.

        Args:
            callback: Name of the callback, for the message.
            device: Device of the run.
            others: Schemes to name in place of this one, the nearest first.
            also: Another remedy, for the message.

        Raises:
            DloError: If it has not; the message has the nearest scheme that works.
        """
        missing = self.lacks(device)
        if not missing:
            return
        works = next((other.name for other in others if not other.lacks(device)), None)
        needed = f"a {' or '.join(self.devices)} device"
        if "cuda" in self.devices:
            needed += f" (CUDA of compute capability {self.capability[0]}.{self.capability[1]} or more)"
        fix = f"set scheme: {works}" if works else "leave the callback out"
        raise DloError(f"{callback}: scheme {self.name} must have {needed}, got {missing}; {fix}{also}")


@dataclass(frozen=True)
class Scheme(Kernels):
    """Scheme of quantisation.

    Attributes:
        bits: Bits of a weight.
        grid: Levels of the weights: ``symmetric``, one scale per output feature around 0; ``affine``, one scale and
            one float offset per group of input features; ``float8``, one scale per output feature.
        activations: Quantisation of a layer's input: ``dynamic``, a scale per token, computed in each forward;
            ``static``, one scale per layer from calibration data; None to leave it.
    """

    bits: int
    grid: Literal["symmetric", "affine", "float8"]
    activations: Literal["dynamic", "static"] | None

    @property
    def is_grouped(self) -> bool:
        """Whether a scale belongs to a group of input features."""
        return self.grid == "affine"


_BOTH = ("cpu", "cuda")
_PER_TOKEN, _CALIBRATED = "weights and activations, scales per token", "weights and activations, calibrated scales"
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", f"int8 {_PER_TOKEN}", (8, 0), _BOTH, 8, "symmetric", "dynamic"),
        Scheme(
            "int8_static", "int8 weights and activations, calibrated scales", (8, 0), _BOTH, 8, "symmetric", "static"
        ),
        Scheme("int8_weights", "int8 weights", (7, 0), _BOTH, 8, "symmetric", None),
        Scheme("int4_weights", "int4 weights in groups", (8, 0), _BOTH, 4, "affine", None),
        Scheme("fp8", f"float8 {_PER_TOKEN}", (8, 9), ("cuda",), 8, "float8", "dynamic"),
    )
}
#: Schemes to try in place of one that a device lacks, the nearest first.
_NEAREST = {"fp8": ("int8", "int8_weights"), "int4_weights": ("int8_weights",)}


def find_scheme(name: str) -> Scheme:
    """Returns a scheme by its name.

    Raises:
        DloError: If there is none; the message has the nearest.
    """
    check_choice("Quantise: scheme", name, SCHEMES)
    return SCHEMES[name]


def check_device(scheme: Scheme, device: torch.device) -> None:
    """Checks that a device has kernels for a scheme of `Quantise`; see :meth:`Kernels.check`."""
    scheme.check("Quantise", device, (SCHEMES[name] for name in (*_NEAREST.get(scheme.name, ()), *SCHEMES)))


def check_torchao() -> None:
    """Checks that torchao is installed, without importing it.

    Raises:
        DloError: If it is not.
    """
    if importlib.util.find_spec("torchao") is None:
        raise DloError("Quantise: torchao must be installed, got none; run `pip install dlo_framework[quantisation]`")


def check_group_size(scheme: Scheme, group_size: int | None) -> int:
    """Returns the group size of a scheme, 32 by default.

    Raises:
        DloError: If the scheme has no groups, or no kernel takes the size.
    """
    if group_size is None:
        return GROUP_SIZES[0]
    if not scheme.is_grouped:
        raise DloError(
            f"Quantise: group_size must be unset for scheme {scheme.name}, which has a scale per output feature, got"
            f" {group_size}; remove it, or set scheme: int4_weights"
        )
    if group_size not in GROUP_SIZES:
        near = min(GROUP_SIZES, key=lambda size: abs(size - group_size))
        raise DloError(
            f"Quantise: group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {group_size}; set {near}"
        )
    return group_size


def quantised_weight(weight: Tensor, scheme: Scheme, group_size: int, input_scale: Tensor | None = None) -> Tensor:
    """Returns torchao's quantised tensor of a weight, whose linear layers run its kernels.

    Args:
        weight: Weight, [N, K], on the device of the kernels.
        scheme: Scheme of quantisation.
        group_size: Number of input features of a group.
        input_scale: Scale of the layer's input, with as many dims as the input, for static activations.
    """
    from torchao import quantization as ao

    if scheme.grid == "symmetric":
        from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

        # Not by torchao's configs, which know its default range alone: see the top of this module.
        mapping, activations = ao.MappingType.SYMMETRIC_NO_CLIPPING_ERR, None
        if scheme.activations is not None:
            granularity = ao.PerRow() if scheme.activations == "dynamic" else ao.PerTensor()
            activations = QuantizeTensorToInt8Kwargs(granularity, mapping)
        return ao.Int8Tensor.from_hp(
            weight, ao.PerRow(), mapping, act_quant_kwargs=activations, act_quant_scale=input_scale
        )
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    ao.quantize_(layer, torchao_config(scheme, group_size, weight.device))
    return layer.weight


def folder_weight(weight: Tensor, scheme: Scheme, group_size: int) -> Tensor:
    """Returns a weight in a class of torchao (0.18) that safetensors files of transformers can hold, from any device.

    int4 levels are in a byte each: the classes with two levels to a byte are packed for kernels of CUDA, or cannot be
    saved. The values are those of :func:`quantised_weight`, up to the rounding of the product.

    Args:
        weight: Weight, [N, K].
        scheme: Scheme of quantisation, with a symmetric or an affine grid.
        group_size: Number of input features of a group.
    """
    if scheme.grid == "symmetric":
        return quantised_weight(weight, scheme, group_size)
    from torchao.quantization import IntxUnpackedToInt8Tensor

    grid = affine_grid(weight, scheme.bits, group_size)
    assert grid.offset is not None
    scale, offset = (part.squeeze(-1).to(weight.dtype) for part in (grid.scale, grid.offset))  # [N, G]
    codes = (levels(weight, grid) - grid.middle).to(torch.int8)
    # Its value is (level - zero) * scale, and ours level * scale + offset.
    return IntxUnpackedToInt8Tensor(codes, scale, -offset / scale, _INT4, [1, group_size], weight.dtype, None)


def folder_config(scheme: Scheme, group_size: int, device: torch.device) -> Any:
    """Returns torchao's config of a folder for transformers, to which the weights of :func:`folder_weight` belong."""
    from torchao import quantization as ao

    if scheme.is_grouped and device.type != "cuda":
        return ao.IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=ao.PerGroup(group_size))
    return torchao_config(scheme, group_size, device)


def torchao_config(scheme: Scheme, group_size: int, device: torch.device) -> Any:
    """Returns torchao's config for a scheme on a device.

    Args:
        scheme: Scheme of quantisation, but with static activations, which have a config per layer.
        group_size: Number of input features of a group.
        device: Device on which the model will run.
    """
    from torchao import quantization as ao

    # torchao's default changes settings of Inductor for the process.
    plain: dict[str, Any] = {"set_inductor_config": False}
    if scheme.name == "int8":
        return ao.Int8DynamicActivationInt8WeightConfig(**plain)
    if scheme.name == "int8_weights":
        return ao.Int8WeightOnlyConfig(**plain)
    if scheme.name == "fp8":
        return ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow(), **plain)
    if device.type == "cuda":
        from torchao.quantization.quantize_.workflows import Int4PackingFormat

        packing = Int4PackingFormat.TILE_PACKED_TO_4D
        return ao.Int4WeightOnlyConfig(group_size=group_size, int4_packing_format=packing, **plain)
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=group_size, **plain)


@dataclass(frozen=True)
class QuantisationOptions:
    """Options of a quantisation.

    Attributes:
        scheme: Scheme of quantisation.
        group_size: Number of input features of a group.
        skip: Patterns of modules to leave out.
        calibration_batches: Number of training batches for static activations.
        limit_val_batches: Number or fraction of validation batches; None for all.
        targets: Files and folders to export to, relative to the run's folder ``quantised``.
        exports_faster: Whether to export, without targets, to the one of ONNX and torch.export that is faster on the
            CPU, where the model can be exported to both.
    """

    scheme: Scheme
    group_size: int
    skip: tuple[str, ...] = ()
    calibration_batches: int = 8
    limit_val_batches: int | float | None = None
    targets: tuple[str, ...] = ()
    exports_faster: bool = False

    def with_limit(self, limit_val_batches: int | float | None) -> QuantisationOptions:
        """Returns these options with another number or fraction of validation batches."""
        return replace(self, limit_val_batches=limit_val_batches)
