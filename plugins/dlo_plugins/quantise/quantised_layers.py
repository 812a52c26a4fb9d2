"""Layers that are quantised: their choice by name, conversion to torchao's weights, and calibration of their inputs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dlo_framework.errors import DloError, did_you_mean, shown_names
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.tensor.projections import RowProduct
from dlo_plugins.quantise.schemes import GROUP_SIZES, INT4_ROWS, Scheme, quantised_weight, symmetric_scale


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
    found: dict[str, Tensor] = {}
    dims: dict[str, set[int]] = {name: set() for name in names}

    def observe(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        scale = symmetric_scale(args[0].detach().float().reshape(1, -1), 8).clamp(min=torch.finfo(torch.float32).eps)
        found[name] = torch.maximum(found.get(name, scale), scale)
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
        return {name: found[name].reshape([1] * max(dims[name])) for name in names}

    handles = [model.get_submodule(name).register_forward_pre_hook(partial(observe, name)) for name in names]
    try:
        yield scales
    finally:
        for handle in handles:
            handle.remove()


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, those inside quantised tensors too; a tensor that is shared counts once."""
    seen: dict[int, int] = {}

    def add(tensor: Tensor) -> None:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            seen[tensor.data_ptr()] = tensor.nbytes
            return
        for name in flatten()[0]:
            add(getattr(tensor, name))

    for tensor in tensors:
        add(tensor)
    return sum(seen.values())


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
    found = [name for name in linear_layers(model) if not _covered(name, head)]
    chosen = leave_out(found, skip, "Quantise: skip must match linear layers that would be quantised")
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
    found: dict[str, None] = {}
    for name in some:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        found[pattern if {each for each in names if _covered(each, [pattern])} <= set(some) else name] = None
    return list(found)


def _check_shapes(model: nn.Module, names: list[str], group_size: int, slices: int) -> None:
    found = linear_layers(model)
    shapes = {name: found[name].weight.shape for name in names}
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
