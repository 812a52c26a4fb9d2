"""Frozen linear layer with a weight of 4-bit codes and one scale for each block of input features: NF4 and INT4.

QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023, arXiv 2305.14314. Departures: scales are bf16
(4.25 bits a weight with blocks of 64) in place of double quantisation (4.13 bits); blocks do not cross rows.

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
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from dlo_framework.errors import DloError

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

    Attributes:
        codes: Two codes a byte, the first in the high bits, `[out_features, in_features / 2]`.
        scales: Largest absolute weight of each block, `[out_features, in_features / block]`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        kind: Kind,
        block: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.kind, self.block, self.source_dtype = kind, block, dtype
        codes = torch.zeros(out_features, in_features // 2, dtype=torch.uint8, device=device)
        scales = torch.zeros(out_features, in_features // block, dtype=torch.bfloat16, device=device)
        self.codes, self.scales = nn.Parameter(codes, requires_grad=False), nn.Parameter(scales, requires_grad=False)
        self.bias = bias

    @classmethod
    def from_linear(cls, name: str, linear: nn.Linear, kind: Kind, block: int) -> FourBitLinear:
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
        made = cls(inputs, linear.out_features, linear.bias, kind, block, weight.dtype, weight.device)
        if not weight.is_meta:
            codes, scales = quantise(weight, kind, block)
            made.codes.data, made.scales.data = codes, scales
        return made

    def to_linear(self) -> nn.Linear:
        """Returns a linear layer with the dequantised weight, in the dtype before quantisation."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight = nn.Parameter(self.weight.to(self.source_dtype), requires_grad=False)
        linear.bias = self.bias  # type: ignore[assignment]
        return linear

    @property
    def weight(self) -> Tensor:
        """Dequantised weight, `[out_features, in_features]`, computed at each access."""
        return self.dequantise(torch.promote_types(self.scales.dtype, torch.float32))

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in a dtype."""
        return dequantise(self.codes.detach(), self.scales.detach(), self.kind, dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """Returns the product without the bias, in autocast's dtype if that is on."""
        device = x.device.type
        # Compiled devices have autocast; torch.compile (2.11) cannot trace the question.
        has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
        is_on = has_autocast and torch.is_autocast_enabled(device)
        if is_on and x.dtype != torch.float64:  # Autocast does not cast float64.
            x = x.to(torch.get_autocast_dtype(device))
        if torch.compiler.is_compiling():
            # Else the compiler keeps the dequantised weight for backward.
            traced: Tensor = checkpoint(self._linear, x, use_reentrant=False, preserve_rng_state=False)
            return traced
        found: Tensor = _Product.apply(x, self)
        return found

    def _linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantise(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the projection of `x`."""
        found = self.multiply(x)
        return found if self.bias is None else found + self.bias.to(found.dtype)

    def extra_repr(self) -> str:
        """Returns the sizes and the kind."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.kind}, block={self.block}"


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
        found = torch.bucketize(ratios, between).to(torch.uint8).flatten(1)
        codes.append(found[:, 0::2] << 4 | found[:, 1::2])
        scales.append(largest)
    return torch.cat(codes), torch.cat(scales)


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
