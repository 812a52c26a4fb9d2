"""Conversion of a trained model's layers to torchao's quantised weights, and calibration of their inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError, shown_names
from dlo_plugins.quantisation.schemes import Scheme, quantised_weight


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
    from torchao.quantization import AffineQuantizedMinMaxObserver, MappingType, PerTensor

    observers: dict[str, Any] = {}
    dims: dict[str, set[int]] = {name: set() for name in names}
    for name in names:
        observers[name] = AffineQuantizedMinMaxObserver(
            MappingType.SYMMETRIC_NO_CLIPPING_ERR,
            torch.int8,
            granularity=PerTensor(),
            eps=torch.finfo(torch.float32).eps,
            scale_dtype=torch.float32,
            zero_point_dtype=torch.int32,
        )

    def observe(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            dims[name].add(args[0].ndim)
            observers[name](args[0].detach())

        return hook

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
        return {name: observers[name].calculate_qparams()[0].reshape([1] * dims[name].copy().pop()) for name in names}

    handles = [model.get_submodule(name).register_forward_pre_hook(observe(name)) for name in names]
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


def model_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's parameters and buffers."""
    return tensor_bytes([*model.parameters(), *model.buffers()])
