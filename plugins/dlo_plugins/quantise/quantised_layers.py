"""Layers that are quantised: their choice by name, conversion, calibration of their inputs, and rounding in training.

Conversion gives a layer torchao's weights. In training :class:`FakeQuantiser` rounds weights, and for some schemes the
input, to the levels of a scheme: Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference. Jacob et al., 2017, arXiv 1712.05877.

The layer stays the same module with the same parameters, and gets another forward; so names, shards, slices of tensor
parallelism and checkpoints do not change. Forward saves the input, the weight itself and the scales; backward rounds
again. A rounded copy of the weights would take the memory of the full model until backward, which sharding avoids.

Under tensor parallelism, a row projection has slices of the rows: the scales of its weight and of its input come from
the maximum over the ranks, in one all-reduce.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dlo_framework.errors import DloError, did_you_mean, shown_names
from dlo_framework.local_memory import stored_tensors
from dlo_framework.models.autocast import autocast_dtype, no_autocast
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.tensor.projections import RowProduct
from dlo_plugins.quantise.schemes import (
    GROUP_SIZES,
    INT4_ROWS,
    Grid,
    Scheme,
    affine_grid,
    fake_quantise,
    float8_grid,
    grid_of_scale,
    quantised_weight,
    rounding_gradient,
    symmetric_grid,
    symmetric_scale,
    traced_fake_quantise,
)


@torch.no_grad()
def convert(
    model: nn.Module,
    names: Sequence[str],
    scheme: Scheme,
    group_size: int,
    device: torch.device,
    input_scales: dict[str, Tensor] | None = None,
) -> None:
    """Replaces the weights of layers by torchao's quantised tensors, in place.

    Args:
        model: Model with its weights, on the device.
        names: Names of the layers.
        scheme: Scheme of quantisation.
        group_size: Number of input features of a group.
        device: Device on which the model will run.
        input_scales: Scale of each layer's input, for static activations; see :func:`calibrate`.
    """
    if computes_in_bf16(scheme, device):
        model.to(torch.bfloat16)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        scale = None if input_scales is None else input_scales[name]
        weight = quantised_weight(layer.weight.detach(), scheme, group_size, scale)
        layer.weight = nn.Parameter(weight, requires_grad=False)


def computes_in_bf16(scheme: Scheme, device: torch.device) -> bool:
    """Returns whether a converted model is in bf16 on a device, as torchao's (0.18) kernels for some schemes require.

    Those are grouped weights, and fp8 with a scale per row.
    """
    return device.type == "cuda" and (scheme.is_grouped or scheme.name == "fp8")


@contextlib.contextmanager
def observed_inputs(model: nn.Module, names: Sequence[str]) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Observes the range of each layer's input inside the block, and yields a function that returns the scales.

    Each scale has as many dims as the input, all of size 1.

    Raises:
        DloError: From the function, if a layer has not been called, or with inputs of different numbers of dims.
    """
    largest: dict[str, Tensor] = {}
    dims: dict[str, set[int]] = {name: set() for name in names}

    def observe(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        scale = symmetric_scale(args[0].detach().float().reshape(1, -1), 8).clamp(min=torch.finfo(torch.float32).eps)
        largest[name] = torch.maximum(largest.get(name, scale), scale)
        dims[name].add(args[0].ndim)

    def scales() -> dict[str, Tensor]:
        never = [name for name in names if not dims[name]]
        if never:
            raise DloError(
                f"Quantise: calibration data must reach each layer, got none in {shown_names(never)}; add them to skip,"
                " or raise calibration_batches"
            )
        mixed = [name for name in names if len(dims[name]) > 1]
        if mixed:
            raise DloError(
                "Quantise: each layer's input must have one number of dims for int8_static, got"
                f" {sorted(dims[mixed[0]])} in {shown_names(mixed)}; add them to skip, or set scheme: int8"
            )
        return {name: largest[name].reshape([1] * max(dims[name])) for name in names}

    handles = [model.get_submodule(name).register_forward_pre_hook(partial(observe, name)) for name in names]
    try:
        yield scales
    finally:
        for handle in handles:
            handle.remove()


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, those inside quantised tensors too; a tensor that is shared counts once."""
    return sum({held.data_ptr(): held.nbytes for tensor in tensors for held in stored_tensors(tensor)}.values())


def measure_bytes(model: nn.Module, names: Sequence[str]) -> tuple[int, int]:
    """Returns the bytes of a model's parameters and buffers, and those of the weights of some layers."""
    weights: list[Any] = [model.get_submodule(name).weight for name in names]
    return tensor_bytes([*model.parameters(), *model.buffers()]), tensor_bytes(weights)


def choose_layers(
    model: nn.Module,
    scheme: Scheme,
    group_size: int,
    skip: Sequence[str] = (),
    head: Sequence[str] = (),
    slices: int = 1,
) -> list[str]:
    """Returns the names of the linear layers to quantise.

    Left out are the head, whose errors go into the logits unreduced, layers that share their weight with another
    module, adapters of LoRA, and projections that are never called, as in ``nn.MultiheadAttention``.

    Args:
        model: Full model, which may be on the meta device.
        scheme: Scheme of quantisation.
        group_size: Number of input features of a group.
        skip: Patterns of modules to leave out.
        head: Patterns of the modules after the last block.
        slices: Number of slices of tensor parallelism that a row may be cut into.

    Raises:
        DloError: If a pattern matches no layer, none is left, or a layer has a shape that the scheme cannot have.
    """
    layers = [name for name in linear_layers(model) if not _covered(name, head)]
    chosen = leave_out(layers, skip, "Quantise: skip must match linear layers that would be quantised")
    if not chosen:
        raise DloError(
            f"Quantise: {type(model).__name__} must have linear layers outside its head and skip, got none; shorten"
            " skip, or leave the callback out"
        )
    if scheme.is_grouped:
        _check_shapes(model, chosen, group_size, slices)
    return chosen


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers that are called and have their weight alone, without LoRA's adapters, by name."""
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, NonDynamicallyQuantizableLinear)
        and uses[id(module.weight)] == 1
        and ".lora_" not in f".{name}"
    }


def leave_out(names: Sequence[str], skip: Sequence[str], rule: str) -> list[str]:
    """Returns the names of the layers that no pattern matches.

    Args:
        names: Names of layers.
        skip: Patterns of modules to leave out.
        rule: Rule of the patterns, for the message.

    Raises:
        DloError: If a pattern matches no layer.
    """
    for pattern in skip:
        if not any(_covered(name, [pattern]) for name in names):
            known = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
            near = did_you_mean(pattern, sorted(known))
            raise DloError(f"{rule}, got '{pattern}', which matches none{near or '; remove it'}")
    return [name for name in names if not _covered(name, skip)]


def _covered(name: str, patterns: Sequence[str]) -> bool:
    return bool(patterns) and bool(ParallelPlan(head=tuple(patterns)).owners(name))


def _patterns(some: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns patterns that match some of the names and no other: with `*` for numbers where that is so."""
    patterns: dict[str, None] = {}
    for name in some:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        patterns[pattern if {each for each in names if _covered(each, [pattern])} <= set(some) else name] = None
    return list(patterns)


def _check_shapes(model: nn.Module, names: list[str], group_size: int, slices: int) -> None:
    layers = linear_layers(model)
    shapes = {name: layers[name].weight.shape for name in names}
    uneven = [name for name, (_, inputs) in shapes.items() if inputs % group_size]
    if uneven:
        fits = [size for size in GROUP_SIZES if not any(inputs % size for _, inputs in shapes.values())]
        fix = f"set group_size: {max(fits)}" if fits else f"add to skip: {', '.join(_patterns(uneven, names))}"
        raise DloError(
            f"Quantise: group_size must divide the input features of each layer, got {group_size} for"
            f" {shapes[uneven[0]][1]} of {shown_names(uneven)}; {fix}"
        )
    odd = [name for name, (outputs, _) in shapes.items() if outputs % INT4_ROWS]
    if odd:
        raise DloError(
            f"Quantise: the output features of each layer must be a multiple of {INT4_ROWS} for int4_weights, got"
            f" {shapes[odd[0]][0]} of {shown_names(odd)}; add to skip:"
            f" {', '.join(_patterns(odd, names))}"
        )
    cut = [name for name, (_, inputs) in shapes.items() if inputs % slices or inputs // slices % group_size]
    if slices > 1 and cut:
        sizes = [n for n in range(slices - 1, 0, -1) if all(k % (n * group_size) == 0 for _, k in shapes.values())]
        raise DloError(
            f"Quantise: group_size must divide the slices of tensor parallelism, got {group_size} for"
            f" {shapes[cut[0]][1]} / {slices} input features of {shown_names(cut)}; set tp={sizes[0]}"
        )


def replaced_method(layer: nn.Module) -> str:
    """Returns the method of a linear layer that other products replace: of a row projection, its product."""
    return "product" if isinstance(layer, RowProduct) else "forward"


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
    quantised = x if grid is None else fake_quantise(x, grid)
    return quantised if dtype is None else quantised.to(dtype)
