"""Base weights of adapters in 4 bits (QLoRA): quantises a model's blocks, reads and initialises shards, and back.

QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023, arXiv 2305.14314. The layer and its departures:
:mod:`dlo_framework.four_bit_linear`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.checkpoint import LazyStateDict
from dlo_framework.four_bit_linear import FourBitLinear, Kind
from dlo_framework.shards import Box, Shard, held_boxes
from dlo_tasks.llm.language_models import find_blocks


def quantise_base(model: Any, kind: Kind, block: int, double: bool = False) -> None:
    """Replaces the linear layers of a model's blocks by 4-bit ones, in place; adapters, norms and biases stay.

    Args:
        model: Model of transformers with adapters, also on the meta device.
        kind: Kind of the levels.
        block: Number of input features that share a scale.
        double: Whether the scales are quantised too.

    Raises:
        DloError: A layer's input features are not a multiple of the block.
    """
    from transformers.pytorch_utils import Conv1D

    blocks_name, blocks = find_blocks(model)
    for name, module in list(blocks.named_modules(prefix=blocks_name)):
        if ".lora_" in name:
            continue
        if isinstance(module, nn.Linear):
            model.set_submodule(name, FourBitLinear.from_linear(name, module, kind, block, double))
        elif isinstance(module, Conv1D):
            layer = FourBitLinear.from_linear(name, _linear_of(module), kind, block, double)
            layer.transposed = True
            model.set_submodule(name, layer)


def dequantise_base(model: nn.Module) -> None:
    """Replaces a model's 4-bit layers by those that they were, with the same weights, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, FourBitLinear):
            linear = module.to_linear()
            model.set_submodule(name, _conv1d_of(linear) if module.transposed else linear)


def is_transposed(module: nn.Module) -> bool:
    """Returns whether a projection's weight is `[in, out]`, as GPT-2's, also in 4 bits."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D) or (isinstance(module, FourBitLinear) and module.transposed)


def _linear_of(conv: Any) -> nn.Linear:
    """Returns a linear layer with the weight of transformers' Conv1D."""
    with torch.device("meta"):
        linear = nn.Linear(conv.nx, conv.nf, bias=False)
    linear.weight = nn.Parameter(conv.weight.detach().t().contiguous(), requires_grad=False)
    linear.bias = conv.bias
    return linear


def _conv1d_of(linear: nn.Linear) -> Any:
    """Returns transformers' Conv1D with the weight of a linear layer."""
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        conv = Conv1D(linear.out_features, linear.in_features)
    conv.weight = nn.Parameter(linear.weight.detach().t().contiguous(), requires_grad=False)
    conv.bias = linear.bias
    return conv


def initialise(model: Any, layer: FourBitLinear) -> None:
    """Draws the weight of a layer as its family does, and quantises it; codes and scales have their full shapes."""
    inputs, outputs = 2 * layer.codes.shape[1], layer.codes.shape[0]
    linear = nn.Linear(inputs, outputs, bias=False, device=layer.codes.device, dtype=layer.source_dtype)
    model._init_weights(linear)
    for key, value in layer.quantise(linear.weight.detach()).items():
        layer.get_parameter(key).copy_(value)
    if layer.bias is not None:
        layer.bias.data.zero_()


def read_codes(saved: LazyStateDict, stored: str, layer: FourBitLinear, key: str, shard: Shard) -> None:
    """Fills a shard of a layer's codes or scales from the stored weight, of which it reads the blocks of the shard.

    Double quantisation needs the full rows of a shard of scales.

    Args:
        saved: Stored weights.
        stored: Name of the layer's weight among them.
        layer: Layer.
        key: Parameter of the layer, `codes`, `scales` or `scale_ranges`.
        shard: Shard of the parameter.
    """
    inputs = saved.shape(stored)[0 if layer.transposed else 1]
    per_entry, full_rows = 2 if key == "codes" else layer.block, layer.quantises_scales and key != "codes"
    for box, view in held_boxes(shard):
        if box.numel == 0:
            continue
        (row, column), (rows, columns) = box.offsets, box.sizes
        first = 0 if full_rows else column * per_entry // layer.block * layer.block
        last = math.ceil((column + columns) * per_entry / layer.block) * layer.block
        last = inputs if full_rows else min(inputs, last)
        box_of_weight = Box((row, first), (rows, last - first))
        if layer.transposed:
            box_of_weight = Box(box_of_weight.offsets[::-1], box_of_weight.sizes[::-1])
        weight: Tensor = torch.empty(box_of_weight.sizes, dtype=layer.source_dtype, device=view.device)
        saved.read_part(stored, box_of_weight, weight)
        found = layer.quantise(weight.t().contiguous() if layer.transposed else weight)[key]
        view.copy_(found.narrow(1, column - first // per_entry, columns))
