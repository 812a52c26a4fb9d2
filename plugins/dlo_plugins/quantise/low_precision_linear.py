"""Linear layers whose three products are of int8 or float8 numbers; weights keep their dtype, names and memory.

The layer stays the same module with the same parameters, and gets another forward. So names, shards, slices of tensor
parallelism and checkpoints do not change. Forward saves the input and no rounded tensor; backward rounds again, from
the parameter that sharding has gathered by then.

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

Under tensor parallelism, a layer's weight `[N, K]` is sliced along N (column projection) or K (row projection). Along N
the gradient of the output is sliced too, along K the input. A scale of a full factor needs the maximum over the ranks
if the factor is sliced, a scale per row only if the rows are: in the product that sums over the sliced dim. Then tensor
parallelism rounds as one process does.

Shapes: T tokens, K input features, N output features.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.models.autocast import autocast_dtype, no_autocast
from dlo_plugins.parallel.tensor.projections import RowProduct
from dlo_plugins.quantise.quantised_layers import replaced_method

#: Role of a factor in the products of a linear layer.
Role = Literal["input", "weight", "gradient"]
#: Sliced dim of a weight `[N, K]`; None for a full weight.
SlicedDim = Literal[0, 1] | None
_SLICED: dict[int, tuple[Role, Role]] = {0: ("gradient", "weight"), 1: ("input", "weight")}
_OPS = torch.ops._c10d_functional


def shares_maximum(roles: tuple[Role, Role], role: Role, sliced: SlicedDim, rowwise: bool) -> bool:
    """Returns whether a factor's scales need the maximum over the ranks of tensor parallelism.

    Args:
        roles: Roles of both factors of the product.
        role: Role of the factor.
        sliced: Sliced dim of the layer's weight.
        rowwise: Whether each row of a factor has a scale, in place of one for the full factor.
    """
    if sliced is None:
        return False
    return set(roles) == set(_SLICED[sliced]) if rowwise else role in _SLICED[sliced]


def maximum(values: Tensor, group: str) -> Tensor:
    """Returns the elementwise maximum over the ranks of a process group, by its name; traced by torch.compile."""
    found: Tensor = _OPS.wait_tensor(_OPS.all_reduce(values.contiguous(), "max", group))
    return found


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
        rounded_a = _pad(F.pad(rounded_a, (0, 0, 0, max(0, _CUDA_ROWS - len(a)))), _CUDA_MULTIPLE)
        rounded_b = _pad(rounded_b, _CUDA_MULTIPLE)
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

    cast = _Float8Cast.of(rowwise, emulate)
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

    @classmethod
    @functools.lru_cache(maxsize=4)
    def of(cls, rowwise: bool, emulate: bool) -> _Float8Cast:
        return cls(rowwise, emulate)

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


def _as_float(x: Tensor, halves: bool) -> Tensor:
    """Returns a factor in a dtype that the casts take; in bf16 where the kernels write no other."""
    if x.dtype == torch.bfloat16:
        return x
    return x.bfloat16() if halves else x.float()


def _pad(x: Tensor, multiple: int, rows: bool = True) -> Tensor:
    """Returns a matrix with zeros to multiples; they change neither scales nor products."""
    more = [-size % multiple for size in x.shape]
    return F.pad(x, (0, more[1], 0, more[0] if rows else 0)) if any(more) else x


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
        self._settings = scheme, weight_gradient, emulate
        self.layers: list[nn.Module] = []

    def install(self, layer: nn.Module, sliced: SlicedDim = None, group: str = "") -> None:
        """Replaces a layer's forward; of a row projection, its product.

        Args:
            layer: Linear layer.
            sliced: Dim along which tensor parallelism slices its weight; None for a full weight.
            group: Name of the process group that slices it.
        """
        torch.compiler.allow_in_graph(_LowPrecisionLinear)  # Compiled blocks then have no graph break here.
        layer.__dict__[_PRODUCTS] = (*self._settings, sliced, group)
        # A method of a function, which torch.compile (2.11) traces, bound to the layer: so is that of a deep copy.
        layer.__dict__[replaced_method(layer)] = MethodType(forward, layer)
        self.layers.append(layer)

    def remove(self) -> None:
        """Restores the forwards of the layers."""
        for layer in self.layers:
            for name in (replaced_method(layer), _PRODUCTS):
                layer.__dict__.pop(name, None)
        self.layers = []


def forward(layer: Any, x: Tensor) -> Tensor:
    """Returns a layer's output; without its bias for a row projection, whose output is a partial sum.

    Its name is that of the method which it replaces: a bound method is pickled by its name.
    """
    dtype = autocast_dtype(x.device.type) or x.dtype
    found: Tensor = _LowPrecisionLinear.apply(x, layer.weight, dtype, *layer.__dict__[_PRODUCTS])
    if layer.bias is None or isinstance(layer, RowProduct):
        return found
    return found + layer.bias.to(found.dtype)


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
