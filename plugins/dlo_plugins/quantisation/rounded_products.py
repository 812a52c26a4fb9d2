"""Matrix products of rows that are rounded to int8, or that torchao rounds to float8.

int8: SwitchBack: Stable and low-precision training for large-scale vision-language models. Wortsman et al., 2023,
arXiv 2304.13013. Departures: all three products are int8 by default, as in torchao's prototype (0.18); scales are per
row of either factor. torchao's is a tensor subclass of the weight, which strategies other than FSDP do not expect.

float8, with one scale per tensor, per row, or per 32 elements (MX):
FP8 Formats for Deep Learning. Micikevicius et al., 2022, arXiv 2209.05433. Microscaling Data Formats for Deep Learning.
Rouhani et al., 2023, arXiv 2310.10537.

The casts and kernels are those of torchao's `Float8Linear` and `MXFP8Linear` (0.18), of the recipes `tensorwise` and
`rowwise`. These modules save the weight's transpose, or make the weight a tensor subclass; here a layer keeps its
parameter, and backward reads it from the layer, as strategies expect. Gradients are rounded to E5M2 by `fp8`, and to
E4M3, with 4 bits of exponent, by the others.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_plugins.quantisation.shared_scales import Role, SlicedDim, maximum, shares_maximum

#: Multiple of each dim that cuBLAS takes for int8; it also takes no fewer than 17 rows.
_CUDA_MULTIPLE, _CUDA_ROWS = 8, 24


def multiply_rows(a: Tensor, b: Tensor, group: str = "") -> Tensor:
    """Returns `a @ b.T` with both rounded to int8, in single precision.

    Args:
        a: Left factor, `[M, K]`; each row has a scale.
        b: Right factor, `[N, K]`; each row has a scale.
        group: Name of the process group whose ranks have the rows' other slices; empty for full rows.
    """
    (rounded_a, scales_a), (rounded_b, scales_b) = round_rows(a, group), round_rows(b, group)
    if a.device.type == "cuda":
        rounded_a = _pad_to(rounded_a, max(_CUDA_ROWS, _multiple(len(a))), _multiple(a.shape[1]))
        rounded_b = _pad_to(rounded_b, _multiple(len(b)), _multiple(b.shape[1]))
    product = torch._int_mm(rounded_a, rounded_b.t())[: len(a), : len(b)]
    return product.float() * scales_a * scales_b.t()


def round_rows(x: Tensor, group: str = "") -> tuple[Tensor, Tensor]:
    """Returns a matrix in int8, and the scale of each row, `[M, 1]`, in single precision.

    Args:
        x: Matrix, `[M, K]`.
        group: Name of the process group whose ranks have the rows' other slices; empty for full rows.
    """
    x = x.detach().float()
    largest = x.abs().amax(1, keepdim=True)
    scales = (maximum(largest, group) if group else largest) / 127
    return (x / scales.masked_fill(scales == 0, 1)).round().to(torch.int8).contiguous(), scales


def _multiple(size: int) -> int:
    return -(-size // _CUDA_MULTIPLE) * _CUDA_MULTIPLE


def _pad_to(x: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(x, (0, columns - x.shape[1], 0, rows - len(x))) if x.shape != (rows, columns) else x


#: Multiple of the dims that float8 kernels take, and the elements of an MX block.
_MULTIPLE, _BLOCK = 16, 32


def multiply_float8(
    a: Tensor,
    b: Tensor,
    roles: tuple[Role, Role],
    rowwise: bool,
    emulate: bool,
    sliced: SlicedDim = None,
    group: str = "",
) -> Tensor:
    """Returns `a @ b.T` with both rounded to float8.

    Args:
        a: Left factor, `[M, K]`.
        b: Right factor, `[N, K]`.
        roles: Roles of the factors.
        rowwise: Whether each row has a scale, a power of two, in place of one for the full factor.
        emulate: Whether the rounded factors are multiplied in single precision.
        sliced: Sliced dim of the layer's weight.
        group: Name of the process group whose ranks have the other slices.
    """
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

    cast = _float8_cast(rowwise, emulate)
    factors = [_as_float(one, halves=rowwise and not emulate) for one in (a, b)]
    rows, columns = len(a), len(b)
    if not emulate:
        factors = [_pad(one, _MULTIPLE) for one in factors]
    rounded = []
    for one, role, dim in ((factors[0], roles[0], -1), (factors[1].t(), roles[1], 0)):
        axis = dim if rowwise else None
        largest = tensor_to_amax(one, scaling_granularity=cast.granularity, axiswise_dim=axis)
        if shares_maximum(roles, role, sliced, rowwise):
            largest = maximum(largest, group)
        scale = amax_to_scale(largest, cast.dtypes[role], round_scales_to_power_of_2=rowwise)
        rounded.append(
            hp_tensor_and_scale_to_float8(one, scale, cast.dtypes[role], cast.config, cast.roles[role], axis)
        )
    return torch.mm(*rounded)[:rows, :columns]


def multiply_mx(a: Tensor, b: Tensor, emulate: bool) -> Tensor:
    """Returns `a @ b.T` with both rounded to MX float8: blocks of 32 elements of a row share a power of two.

    Args:
        a: Left factor, `[M, K]`.
        b: Right factor, `[N, K]`.
        emulate: Whether the rounded factors are multiplied in single precision.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    left, right = (
        MXTensor.to_mx(
            _pad(_as_float(one, halves=not emulate), _BLOCK, rows=not emulate).contiguous(),
            torch.float8_e4m3fn,
            _BLOCK,
            ScaleCalculationMode.RCEIL,
            preference,
        )
        for one in (a, b)
    )
    return torch.mm(left, right.t())[: len(a), : len(b)]


class _Float8Cast:
    """torchao's settings of the casts and products of one recipe."""

    def __init__(self, rowwise: bool, emulate: bool) -> None:
        from torchao.float8.config import ScalingGranularity, e4m3_dtype, e5m2_dtype
        from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig

        self.granularity = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
        of_gradient = e4m3_dtype if rowwise else e5m2_dtype
        self.dtypes: dict[str, torch.dtype] = {"input": e4m3_dtype, "weight": e4m3_dtype, "gradient": of_gradient}
        self.roles: dict[str, Any] = {
            "input": GemmInputRole.INPUT,
            "weight": GemmInputRole.WEIGHT,
            "gradient": GemmInputRole.GRAD_OUTPUT,
        }
        # Fast accumulation in the output alone, as in the recipes.
        of_output, of_gradients = (ScaledMMConfig(emulate, fast, False, False) for fast in (True, False))
        self.config = LinearMMConfig(of_output, of_gradients, of_gradients)


@functools.lru_cache(maxsize=4)
def _float8_cast(rowwise: bool, emulate: bool) -> _Float8Cast:
    return _Float8Cast(rowwise, emulate)


def _as_float(x: Tensor, halves: bool) -> Tensor:
    """Returns a factor in a dtype that the casts take; in bf16 where the kernels write no other."""
    if x.dtype == torch.bfloat16:
        return x
    return x.bfloat16() if halves else x.float()


def _pad(x: Tensor, multiple: int, rows: bool = True) -> Tensor:
    """Returns a matrix with zeros to multiples; they change neither scales nor products."""
    more = [-size % multiple for size in x.shape]
    return F.pad(x, (0, more[1], 0, more[0] if rows else 0)) if any(more) else x
