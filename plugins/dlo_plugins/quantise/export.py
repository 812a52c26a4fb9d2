"""Exports of a quantised model: a program of torch.export, ONNX, or a folder that transformers loads.

ONNX has no operators for torchao's kernels, so that layers are exported of plain torch operations: weights are stored
as int8, or two int4 levels to a byte; the product is of the levels, as floats, and the scales follow. So a layer gives
torchao's result up to the rounding of float32.
"""

from __future__ import annotations

import copy
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_plugins.quantise.quantised_layers import computes_in_bf16
from dlo_plugins.quantise.schemes import (
    QuantisationOptions,
    Scheme,
    affine_grid,
    folder_config,
    folder_weight,
    levels,
    symmetric_grid,
)


class PortableLinear(nn.Module):
    """Linear layer with a symmetric int8 weight.

    Args:
        layer: Layer with its float weight, [N, K].
        scheme: Scheme of quantisation.
        input_scale: Scale of the input for static activations.
    """

    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None

    def __init__(self, layer: nn.Linear, scheme: Scheme, input_scale: Tensor | None) -> None:
        super().__init__()
        grid = symmetric_grid(layer.weight.detach(), scheme.bits)
        self.activations = scheme.activations
        self.register_buffer("weight", levels(layer.weight.detach(), grid).to(torch.int8))
        self.register_buffer("scale", grid.scale.flatten().clone())
        self.register_buffer("input_scale", input_scale)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output, [..., N]."""
        input_scale = self.input_scale
        if self.activations == "dynamic":
            input_scale = symmetric_grid(x, 8).scale.squeeze(-1)
        if input_scale is None:
            y = F.linear(x, self.weight.to(x.dtype)) * self.scale
        else:
            rounded = torch.round(x * (1.0 / input_scale)).clamp(-128, 127)
            y = F.linear(rounded, self.weight.to(x.dtype)) * input_scale * self.scale
        return y if self.bias is None else y + self.bias


class PortableInt4Linear(nn.Module):
    """Linear layer with an int4 weight in groups, two levels to a byte.

    Args:
        layer: Layer with its float weight, [N, K].
        scheme: Scheme of quantisation.
        group_size: Number of input features of a group.
    """

    packed: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, layer: nn.Linear, scheme: Scheme, group_size: int) -> None:
        super().__init__()
        weight = layer.weight.detach()
        grid = affine_grid(weight, scheme.bits, group_size)
        assert grid.offset is not None
        codes = levels(weight, grid).to(torch.uint8)
        self.middle = grid.middle
        self.register_buffer("packed", codes[:, ::2] + 16 * codes[:, 1::2])
        self.register_buffer("scale", grid.scale.clone())
        self.register_buffer("offset", grid.offset.clone())
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output, [..., N]."""
        both = self.packed.to(x.dtype)
        high = torch.floor(both / 16)
        codes = torch.stack([both - 16 * high, high], dim=-1).flatten(-2)  # [N, K]
        grouped = codes.unflatten(-1, (self.scale.shape[-2], -1))
        weight = ((grouped - self.middle) * self.scale + self.offset).flatten(-2)
        return F.linear(x, weight, self.bias)


def make_portable(
    model: nn.Module, names: Sequence[str], scheme: Scheme, group_size: int, input_scales: dict[str, Tensor] | None
) -> None:
    """Replaces layers of a float model by portable ones, in place; see :func:`.quantised_layers.convert`."""
    for name in names:
        parent, _, own = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        scale = None if input_scales is None else input_scales[name]
        portable: nn.Module = (
            PortableLinear(layer, scheme, scale)
            if not scheme.is_grouped
            else PortableInt4Linear(layer, scheme, group_size)
        )
        setattr(model.get_submodule(parent), own, portable)


#: Endings of files; a name without an ending is a folder.
ENDINGS = (".pt2", ".onnx")
_ONNX_PACKAGES = ("onnx", "onnxscript")


def _missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def takes_tensors(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Returns whether a model can be exported to a file: its arguments are tensors, by position."""
    args, kwargs = inputs
    return not kwargs and all(isinstance(arg, Tensor) for arg in args)


def both_files(module: LightningModule, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[str, ...]:
    """Returns the names of an ONNX and a torch.export file; empty where not both can be written and run."""
    can = takes_tensors(inputs) and not hasattr(module, "export_folder")
    return ("model.onnx", "model.pt2") if can and not _missing((*_ONNX_PACKAGES, "onnxruntime")) else ()


def onnx_forward(path: Path, args: Sequence[Tensor]) -> Callable[[], Any] | None:
    """Returns a function that runs an ONNX file on the CPU, by as many threads as torch; None without ONNX Runtime.

    Args:
        path: File.
        args: Arguments of the model, on the CPU.
    """
    if _missing(["onnxruntime"]):
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    values = {put.name: arg.numpy() for put, arg in zip(session.get_inputs(), args, strict=True)}
    return lambda: session.run(None, values)


def check_name(target: str) -> None:
    """Checks the name of an export and that the packages for it are installed, before processes start.

    Raises:
        DloError: If its ending is unknown, or a package is missing.
    """
    ending = Path(target).suffix
    if ending and ending not in ENDINGS:
        raise DloError(
            f"Quantise: export must end in {' or '.join(ENDINGS)}, or name a folder for transformers, got {target}; set"
            f" {Path(target).with_suffix('.onnx')}"
        )
    missing = _missing(_ONNX_PACKAGES)
    if ending == ".onnx" and missing:
        raise DloError(
            f"Quantise: {' and '.join(missing)} must be installed to export {target}, got none; run `pip install"
            " dlo_framework[onnx]`, or export a .pt2"
        )


def check_target(target: str, module: LightningModule, scheme: Scheme) -> None:
    """Checks that a module can be exported to a file or folder.

    Raises:
        DloError: If it cannot.
    """
    check_name(target)
    exports_folder = hasattr(module, "export_folder")
    if not Path(target).suffix:
        if not exports_folder:
            raise DloError(
                f"Quantise: export must end in {' or '.join(ENDINGS)} for {type(module).__name__}, which has no folder"
                f" format, got {target}; set {target}.onnx"
            )
        if scheme.activations == "static":
            raise DloError(
                "Quantise: scheme must be int8, int8_weights or int4_weights for a folder, got int8_static:"
                " transformers has one config for all layers, and each has its own input scale; set scheme: int8"
            )
    elif exports_folder:
        raise DloError(
            f"Quantise: export must be a folder for {type(module).__name__}, which transformers loads, got {target};"
            f" set {Path(target).stem}"
        )


def export_model(
    path: Path,
    module: LightningModule,
    quantised: nn.Module,
    float_model: nn.Module,
    names: Sequence[str],
    options: QuantisationOptions,
    device: torch.device,
    scales: dict[str, Tensor] | None,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
) -> None:
    """Writes a quantised model; the batch size of programs is free.

    Args:
        path: File or folder.
        module: Module of the model.
        quantised: Model with torchao's tensors, on the CPU or the device.
        float_model: The same model before its conversion, on the CPU.
        names: Names of the quantised layers.
        options: Options of the quantisation.
        device: Device of the conversion.
        scales: Scale of each layer's input, for static activations.
        inputs: Arguments of the model, on the CPU.

    Raises:
        DloError: If the model cannot be exported so.
    """
    if not path.suffix:
        _export_folder(path, module, float_model, names, options, device)
        return
    args, kwargs = inputs
    if not takes_tensors(inputs):
        raise DloError(
            f"Quantise: a model must take tensors by position to be exported as {path.suffix}, got"
            f" {', '.join(kwargs) or 'other arguments'}; leave export out"
        )
    batch = torch.export.Dim("batch", min=1)
    dynamic = tuple({0: batch} for _ in args)
    if path.suffix == ".pt2":
        place = program_device(options.scheme, device)
        args = tuple(program_input(arg, options.scheme, device) for arg in args)
        torch.export.save(torch.export.export(quantised.to(place), args, dynamic_shapes=dynamic), path)
        return
    model = copy.deepcopy(float_model)
    make_portable(model, names, options.scheme, options.group_size, to_cpu(scales))
    program = torch.onnx.export(model, args, dynamo=True, dynamic_shapes=dynamic, verbose=False)
    assert program is not None
    for node in program.model.graph:
        node.metadata_props.clear()  # Stack traces of the export, which take more bytes than the weights.
    program.save(path)


def program_device(scheme: Scheme, device: torch.device) -> torch.device:
    """Returns the device of a program: the CPU, unless weights that were converted on a device run there alone."""
    cpu = torch.device("cpu")
    return device if scheme.is_grouped or scheme.lacks(cpu) else cpu


def program_input(value: Tensor, scheme: Scheme, device: torch.device) -> Tensor:
    """Returns an argument of a model as its program takes it: on the program's device, in the dtype of its kernels."""
    in_bf16 = value.is_floating_point() and computes_in_bf16(scheme, device)
    return value.to(program_device(scheme, device), torch.bfloat16 if in_bf16 else value.dtype)


def to_cpu(scales: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """Returns scales, where there are any, on the CPU."""
    return None if scales is None else {name: scale.cpu() for name, scale in scales.items()}


def _export_folder(
    path: Path,
    module: Any,
    float_model: nn.Module,
    names: Sequence[str],
    options: QuantisationOptions,
    device: torch.device,
) -> None:
    """Writes the folder of ``dlo checkpoint export``, with its linear layers quantised by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM, TorchAoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if path.exists():
        config_file = path / "config.json"
        if not config_file.is_file() or "quantization_config" not in config_file.read_text():
            raise DloError(
                f"Quantise: export must name a new folder, got {path}, which exists; remove it, or choose another"
            )
        shutil.rmtree(path)
    checkpoint: dict[str, Any] = {"state_dict": {f"model.{name}": t for name, t in float_model.state_dict().items()}}
    module.on_save_checkpoint(checkpoint)
    with tempfile.TemporaryDirectory() as place:
        plain = Path(place) / "float"
        type(module).export_folder(checkpoint, plain)
        chosen = {name.removesuffix(".base_layer") for name in names}
        with torch.device("meta"):
            layers = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(plain)).named_modules()
        left = [name for name, layer in layers if isinstance(layer, nn.Linear) and name not in chosen]
        config = TorchAoConfig(folder_config(options.scheme, options.group_size, device), modules_to_not_convert=left)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map=str(device))
        if options.scheme.grid == "symmetric" or (options.scheme.is_grouped and device.type != "cuda"):
            # By the range of `symmetric_grid`, which transformers then reads from the file.
            weights = dict(AutoModelForCausalLM.from_pretrained(plain, device_map=str(device)).named_parameters())
            for name in chosen:
                weight = folder_weight(weights[f"{name}.weight"].detach(), options.scheme, options.group_size)
                model.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)
        shutil.copytree(plain, path, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
        model.save_pretrained(path)
