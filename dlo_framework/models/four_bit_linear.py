"""Frozen linear layer with a weight of 4-bit codes and one scale for each block of input features: NF4 and INT4.

QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023, arXiv 2305.14314. Scales are bf16 (4.25 bits a
weight with blocks of 64) or, by double quantisation, 8-bit (4.13 bits). Departures: neither blocks nor groups of scales
cross rows, and an 8-bit scale is one of 256 even steps between the least and the largest scale of its row, where the
paper has a float of 8 bits and a mean for each 256 scales.

Codes and scales are plain parameters, `[out, in / 2]` and `[out, in / block]`: sharding, slices of tensor parallelism
and checkpoints treat them as any other tensor. torchao's `NF4Tensor` (0.18) and bitsandbytes' `Params4bit` (0.49) hold
one flat run of blocks over the whole weight, which cannot be cut along its input features, and bitsandbytes keeps the
scales outside the parameters, where strategies do not see them.

Forward saves neither the codes nor the dequantised weight: backward dequantises again, from the parameters that
sharding has gathered by then.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensor
from dlo_framework.models.autocast import autocast_dtype

Kind = Literal["nf4", "int4"]
#: Levels of each kind, ascending, times a block's scale. NF4: quantiles of a normal distribution (appendix E).
LEVELS: dict[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ),
    "int4": tuple(level / 7 for level in range(-8, 8)),
}
#: Number of weights that are quantised at once, so that a copy in single precision takes at most 256 MB.
_CHUNK = 1 << 26
#: Number of steps between the least and the largest scale of a row, by double quantisation.
_STEPS = 255


class FourBitLinear(nn.Module):
    """Linear layer with a frozen 4-bit weight.

    Args:
        in_features: Number of input features; a multiple of `block`.
        out_features: Number of output features.
        bias: Bias in full precision; None for none.
        kind: Kind of the levels.
        block: Number of input features that share a scale; even.
        dtype: Dtype of the weight before quantisation, and after :meth:`to_linear`.
        device: Device of codes and scales.
        double: Whether the scales are quantised too (double quantisation).

    Attributes:
        codes: Two codes a byte, the first in the high bits, `[out_features, in_features / 2]`.
        scales: Largest absolute weight of each block, `[out_features, in_features / block]`; its 8-bit code by double
            quantisation.
        transposed: Whether :attr:`weight` is `[in_features, out_features]`, as in transformers' Conv1D.
        scale_ranges: Least and largest scale of each row, `[out_features, 2]`; None without double quantisation.
    """

    scale_ranges: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        kind: Kind,
        block: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        double: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.kind, self.block, self.source_dtype, self.quantises_scales = kind, block, dtype, double
        self.transposed = False
        codes = torch.zeros(out_features, in_features // 2, dtype=torch.uint8, device=device)
        of_scales = torch.uint8 if double else torch.bfloat16
        scales = torch.zeros(out_features, in_features // block, dtype=of_scales, device=device)
        self.codes, self.scales = nn.Parameter(codes, requires_grad=False), nn.Parameter(scales, requires_grad=False)
        ranges = torch.zeros(out_features, 2, dtype=torch.bfloat16, device=device) if double else None
        self.scale_ranges = None if ranges is None else nn.Parameter(ranges, requires_grad=False)
        self.bias = bias

    @classmethod
    def from_linear(cls, name: str, linear: nn.Linear, kind: Kind, block: int, double: bool = False) -> FourBitLinear:
        """Returns a layer with the quantised weight of a linear layer, also on the meta device.

        Raises:
            DloError: The block does not divide the input features.
        """
        weight = linear.weight.detach()
        inputs = linear.in_features
        if inputs % block or block % 2:
            fits = [size for size in (256, 128, 64, 32, 16, 8) if inputs % size == 0]
            raise DloError(
                f"base_block must be even and divide the {inputs} input features of '{name}', got {block};"
                f" {f'set base_block: {fits[0]}' if fits else 'leave lora.base out'}"
            )
        made = cls(inputs, linear.out_features, linear.bias, kind, block, weight.dtype, weight.device, double)
        if not weight.is_meta:
            for key, value in made.quantise(weight).items():
                made.get_parameter(key).data = value
        return made

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns the parameters, by name, of some full rows of a weight."""
        codes, scales = quantise(weight, self.kind, self.block)
        if not self.quantises_scales:
            return {"codes": codes, "scales": scales}
        rounded, ranges = quantise_scales(scales)
        return {"codes": codes, "scales": rounded, "scale_ranges": ranges}

    def to_linear(self) -> nn.Linear:
        """Returns a linear layer with the dequantised weight, in the dtype before quantisation."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        weight = self.weight.t() if self.transposed else self.weight
        linear.weight = nn.Parameter(weight.to(self.source_dtype), requires_grad=False)
        linear.bias = self.bias  # type: ignore[assignment]
        return linear

    @property
    def weight(self) -> Tensor:
        """Dequantised weight, `[out_features, in_features]` unless `transposed`, computed at each access."""
        held = self.scales if self.scale_ranges is None else self.scale_ranges
        dequantised = self.dequantise(torch.promote_types(held.dtype, torch.float32))
        return dequantised.t() if self.transposed else dequantised

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in a dtype."""
        scales = self.scales.detach()
        if self.scale_ranges is not None:
            scales = dequantise_scales(scales, self.scale_ranges.detach())
        return dequantise(self.codes.detach(), scales, self.kind, dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """Returns the product without the bias, in autocast's dtype if that is on."""
        dtype = autocast_dtype(x.device.type)
        if dtype is not None and x.dtype != torch.float64:  # Autocast does not cast float64.
            x = x.to(dtype)
        if torch.compiler.is_compiling():
            # Else the compiler keeps the dequantised weight for backward.
            traced: Tensor = checkpoint(self._linear, x, use_reentrant=False, preserve_rng_state=False)
            return traced
        product: Tensor = _Product.apply(x, self)
        return product

    def _linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantise(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the projection of `x`."""
        product = self.multiply(x)
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def extra_repr(self) -> str:
        """Returns the sizes and the kind."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}, block={self.block}" + (
            ", double quantisation" if self.quantises_scales else ""
        )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantise(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.layer.dequantise(grads[0].dtype), None


@torch.no_grad()
def quantise(weight: Tensor, kind: Kind, block: int) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of a weight.

    Args:
        weight: Weight, `[out, in]`, with `in` a multiple of `block`.
        kind: Kind of the levels.
        block: Number of input features that share a scale.
    """
    levels = torch.tensor(LEVELS[kind], device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    codes, scales = [], []
    for part in weight.split(rows):
        blocks = part.float().unflatten(1, (-1, block))  # [rows, in / block, block]
        largest = blocks.abs().amax(-1).to(torch.bfloat16)
        ratios = blocks / largest.float().masked_fill(largest == 0, 1)[..., None]
        indices = torch.bucketize(ratios, between).to(torch.uint8).flatten(1)
        codes.append(indices[:, 0::2] << 4 | indices[:, 1::2])
        scales.append(largest)
    return torch.cat(codes), torch.cat(scales)


def quantise_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales as codes of 8 bits, and the least and the largest scale of each row, in bf16.

    Args:
        scales: Scales of full rows, `[out, in / block]`.
    """
    wide = scales.float()
    ranges = torch.stack([wide.amin(1), wide.amax(1)], dim=1).to(torch.bfloat16)  # [out, 2]
    least, largest = ranges.float().split(1, dim=1)
    step = (largest - least) / _STEPS
    codes = ((wide - least) / step.masked_fill(step == 0, 1)).round().clamp(0, _STEPS)
    return codes.to(torch.uint8), ranges


def dequantise_scales(codes: Tensor, ranges: Tensor) -> Tensor:
    """Returns the scales of codes, in single precision or in that of the ranges if it is higher.

    Args:
        codes: Codes of 8 bits, `[out, in / block]`.
        ranges: Least and largest scale of each row, `[out, 2]`.
    """
    least, largest = ranges.to(torch.promote_types(ranges.dtype, torch.float32)).split(1, dim=1)
    return least + (largest - least) * (codes.to(least.dtype) / _STEPS)


def dequantise(codes: Tensor, scales: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """Returns the weight `[out, in]` of codes and scales, in a dtype.

    Args:
        codes: Two codes a byte, `[out, in / 2]`.
        scales: Scales, `[out, in / block]`.
        kind: Kind of the levels.
        dtype: Dtype of the levels, the scales and their product.
    """
    pairs = _level_pairs(codes, kind, dtype)
    values = F.embedding(codes.int(), pairs).flatten(1)  # [out, in]
    blocks = values.unflatten(1, (scales.shape[1], -1))
    return (blocks * scales.to(dtype)[..., None]).flatten(1)


def _level_pairs(codes: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    """Returns the two levels of each byte, `[256, 2]`."""
    if isinstance(codes, FakeTensor) or torch.compiler.is_compiling():
        return _make_level_pairs(kind, codes.device, dtype)
    return _kept_level_pairs(kind, codes.device, dtype)


@functools.lru_cache(maxsize=64)
def _kept_level_pairs(kind: Kind, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return _make_level_pairs(kind, device, dtype)


def _make_level_pairs(kind: Kind, device: torch.device, dtype: torch.dtype) -> Tensor:
    pairs = [(high, low) for high in LEVELS[kind] for low in LEVELS[kind]]
    return torch.tensor(pairs, dtype=dtype, device=device)
