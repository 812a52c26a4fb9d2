"""Trains with low-precision products of the blocks' linear layers: int8, float8 and MX float8.

It is a callback, because every strategy has finished its work on the model when training starts: layers are cut and
sharded, and blocks are compiled at their first call. So one mechanism serves the strategies.

A layer's three products are of int8 or float8 numbers; weights keep their dtype, names and memory. The layer stays the
same module with the same parameters, and gets another forward. So names, shards, slices of tensor parallelism and
checkpoints do not change. Forward saves the input and no rounded tensor; backward rounds again, from the parameter that
sharding has gathered by then.

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
import importlib.util
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from dlo_framework.callback import PluginCallback, callbacks_of, traits_of
from dlo_framework.data.description import run_datamodule
from dlo_framework.errors import DloError, agreed_errors, check_choice, check_number
from dlo_framework.models.autocast import autocast_dtype, no_autocast
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task, checkable_module, model_and_plan
from dlo_plugins.parallel.mesh.parallelize import ParallelState
from dlo_plugins.parallel.tensor.projections import RowProduct
from dlo_plugins.quantise.quantised_layers import leave_out, linear_layers, replaced_method
from dlo_plugins.quantise.schemes import Kernels

if TYPE_CHECKING:
    from dlo_framework.distributed.collectives import Communicator


@dataclass(frozen=True)
class ProductScheme(Kernels):
    """Scheme of the three matrix products of a linear layer.

    Attributes:
        multiple: Number that must divide the input and the output features of a layer.
        emulated: Whether torchao can emulate it on any device.
    """

    multiple: int
    emulated: bool = True


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        ProductScheme("int8", "int8, a scale per row", (7, 5), ("cuda", "cpu"), 1, emulated=False),
        ProductScheme("fp8", "float8, a scale per tensor", (8, 9), ("cuda",), 16),
        ProductScheme("fp8_rowwise", "float8, a scale per row", (9, 0), ("cuda",), 16),
        ProductScheme("mxfp8", "float8, a scale per 32 elements", (10, 0), ("cuda",), 32),
    )
}
#: Schemes to name in place of one that a device lacks, the nearest first.
_NEAREST = ("fp8_rowwise", "fp8", "int8")


class LowPrecision(PluginCallback):
    """Computes the products of linear layers in 8 bits, forward and backward; weights and gradients keep their dtypes.

    Only layers inside the plan's blocks are changed, so head and stem stay as they are. So do layers with fewer than
    `min_features`, layers whose sizes the scheme's kernels do not take, layers that share their weight, adapters of
    LoRA and frozen 4-bit weights.

    Args:
        scheme: Scheme of the products: `int8` (a scale per row), `fp8` (float8, a scale per tensor), `fp8_rowwise`, or
            `mxfp8` (a scale per 32 elements of a row).
        weight_gradient: Whether the product of the weights' gradients is in 8 bits too, whose sums are over tokens;
            false computes it in the Trainer's precision.
        skip: Patterns of modules that stay as they are, such as `model.layers.0` or `*.*.*.down_proj`.
        min_features: Least number of input and of output features of a layer, in this rank's slice of it.
        emulate: Whether float8 is emulated on any device: the factors are rounded, and multiplied in single precision.
            It is slower than training without the callback, and shows the numerics.

    Raises:
        DloError: An option is invalid, or the device has no kernels for the scheme.
    """

    example = "{min_features: 8}"

    replaces_products = True

    def __init__(
        self,
        scheme: str = "int8",
        weight_gradient: bool = True,
        skip: list[str] | None = None,
        min_features: int = 64,
        emulate: bool = False,
    ) -> None:
        check_choice("LowPrecision: scheme", scheme, SCHEMES)
        self.scheme, self.emulate = SCHEMES[scheme], emulate
        if emulate and not self.scheme.emulated:
            raise DloError(
                f"LowPrecision: emulate must be false for scheme {scheme}, which runs on CPUs, got true; remove it"
            )
        if scheme != "int8" and importlib.util.find_spec("torchao") is None:
            raise DloError(
                f"LowPrecision: torchao must be installed for scheme {scheme}, got none; run `pip install"
                " dlo_framework[quantisation]`"
            )
        check_number("LowPrecision: min_features", min_features, "at least 1", "64 is usual")
        self.weight_gradient, self.skip, self.min_features = weight_gradient, tuple(skip or ()), min_features
        self._installed: LowPrecisionForward | None = None

    # --- the layers ----------------------------------------------------------------------------------------

    def choose_layers(self, module: nn.Module, plan: ParallelPlan) -> list[str]:
        """Returns the names of the layers to change.

        Raises:
            DloError: A pattern of `skip` matches no layer, or none is left.
        """
        linear = self._linear_layers(module, plan)
        left = leave_out(list(linear), self.skip, "LowPrecision: skip must match linear layers in blocks")
        chosen = [name for name in left if self._takes(linear[name])]
        if not chosen:
            multiple = self.scheme.multiple
            sizes = f"of at least {self.min_features} features" + (
                f" in multiples of {multiple}" if multiple > 1 else ""
            )
            raise DloError(
                f"LowPrecision: {type(module).__name__} must have linear layers {sizes} in its blocks, outside skip,"
                " got none; lower min_features, or leave LowPrecision out"
            )
        return chosen

    def _linear_layers(self, module: nn.Module, plan: ParallelPlan) -> dict[str, nn.Linear]:
        blocks = tuple(f"{block}." for block in plan.block_names(module))
        return {name: layer for name, layer in linear_layers(module).items() if name.startswith(blocks)}

    def _takes(self, layer: nn.Linear) -> bool:
        """Returns whether a layer has sizes for the scheme; those of its weight are no longer there in DeepSpeed."""
        sizes = layer.in_features, layer.out_features
        return min(sizes) >= self.min_features and not any(size % self.scheme.multiple for size in sizes)

    def _install(self, module: nn.Module, plan: ParallelPlan, state: ParallelState | None, prefix: str) -> None:
        names, linear = self.choose_layers(module, plan), self._linear_layers(module, plan)
        self._installed = LowPrecisionForward(self.scheme.name, self.weight_gradient, self.emulate)
        tp = None if state is None else state.sharded.tensor_parallel
        if state is None or tp is None or tp.size == 1:
            for name in names:
                self._installed.install(linear[name])
        else:
            names = _agree(names, list(linear), tp, state.sharded.device)
            assert tp.group is not None
            for name in names:
                cut = state.sharded.layout.slices.get(f"{prefix}{name}.weight")
                sliced: Any = None if cut is None else cut.dim  # 0 or 1: a weight has two dims.
                self._installed.install(linear[name], sliced, tp.group.group_name)
        count = f"{len(names)} of the blocks' {len(linear)}"
        rank_zero_info(f"LowPrecision: {count} linear layers compute in {self.scheme.text}")

    # --- hooks ---------------------------------------------------------------------------------------------

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the run's device and model, before processes start.

        Raises:
            DloError: The device has no kernels, a pattern matches no layer, or no layer is left.
        """
        self._check_device(trainer)
        self._check_callbacks(trainer)
        if (checkable := checkable_module(module)) is not None:
            self.choose_layers(*model_and_plan(checkable))

    def _check_device(self, trainer: Trainer) -> None:
        also = ", or emulate: true, which is slow and shows the numerics" if self.scheme.emulated else ""
        if not self.emulate:
            others = [SCHEMES[name] for name in _NEAREST]
            self.scheme.check("LowPrecision", trainer.strategy.root_device, others, also)

    def _check_callbacks(self, trainer: Trainer) -> None:
        for other in callbacks_of(trainer):
            if other is not self and traits_of(other).replaces_products:
                raise DloError(
                    f"LowPrecision must be the only callback that replaces the layers' products, got"
                    f" {type(other).__name__} too; leave one of the two out"
                )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the run."""
        self._remove()
        if stage != "fit":
            self._check_device(trainer)
        else:
            with agreed_errors():
                if isinstance(pl_module, Task):
                    pl_module.check(run_datamodule(trainer))  # It may read sizes from the data.
                self.check_run(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the products, after the strategy has cut and sharded the model; so in an evaluation of its own."""
        if self._installed is not None:
            return
        prefix = "model." if isinstance(pl_module, Task) else ""
        self._install(*model_and_plan(pl_module), ParallelState.of(pl_module), prefix)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def _remove(self, *_: Any, **__: Any) -> None:
        """Makes the layers compute as they did before."""
        if self._installed is not None:
            self._installed.remove()
            self._installed = None

    on_fit_end = on_test_end = on_predict_end = on_exception = _remove

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends what a validation of its own began."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._remove()


def _agree(names: list[str], all_names: list[str], ranks: Communicator, device: torch.device) -> list[str]:
    """Returns the layers that all ranks of tensor parallelism choose: their slices may differ in size."""
    refused = torch.tensor([float(name not in names) for name in all_names], device=device)
    return [name for name, flag in zip(all_names, ranks.maximum(refused).tolist(), strict=True) if not flag]


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
    largest: Tensor = _OPS.wait_tensor(_OPS.all_reduce(values.contiguous(), "max", group))
    return largest


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
    y: Tensor = _LowPrecisionLinear.apply(x, layer.weight, dtype, *layer.__dict__[_PRODUCTS])
    if layer.bias is None or isinstance(layer, RowProduct):
        return y
    return y + layer.bias.to(y.dtype)


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
            product = multiply(x.flatten(0, -2), weight.detach(), ("input", "weight"), *ctx.settings)
            return product.to(dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight.detach()
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)  # [T, N], [T, K]
        of_x = of_weight = None
        with no_autocast(x.device.type):
            if ctx.needs_input_grad[0]:
                product = multiply(rows, weight.t(), ("gradient", "weight"), *ctx.settings)
                of_x = product.to(x.dtype).view_as(x)
            if ctx.needs_input_grad[1] and ctx.weight_gradient:
                of_weight = multiply(rows.t(), inputs.t(), ("gradient", "input"), *ctx.settings)
            elif ctx.needs_input_grad[1]:
                of_weight = rows.t() @ inputs.to(rows.dtype)
        return of_x, None if of_weight is None else of_weight.to(weight.dtype), *(None,) * 6
