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
from dlo_framework.errors import DloError
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
        DloError: A layer's input features are not a multiple of the block, or the model has transposed projections.
    """
    from transformers.pytorch_utils import Conv1D

    blocks_name, blocks = find_blocks(model)
    if any(isinstance(module, Conv1D) for module in blocks.modules()):
        raise DloError(
            "lora.base must be unset for models with transposed weights (Conv1D), whose blocks of scales would cross"
            f" outputs, got {kind} for {type(model).__name__}; leave it out"
        )
    for name, module in list(blocks.named_modules(prefix=blocks_name)):
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            model.set_submodule(name, FourBitLinear.from_linear(name, module, kind, block, double))


def dequantise_base(model: nn.Module) -> None:
    """Replaces a model's 4-bit layers by linear ones with the same weights, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, FourBitLinear):
            model.set_submodule(name, module.to_linear())


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
    inputs = saved.shape(stored)[1]
    per_entry, full_rows = 2 if key == "codes" else layer.block, layer.quantises_scales and key != "codes"
    for box, view in held_boxes(shard):
        if box.numel == 0:
            continue
        (row, column), (rows, columns) = box.offsets, box.sizes
        first = 0 if full_rows else column * per_entry // layer.block * layer.block
        last = math.ceil((column + columns) * per_entry / layer.block) * layer.block
        last = inputs if full_rows else min(inputs, last)
        weight: Tensor = torch.empty(rows, last - first, dtype=layer.source_dtype, device=view.device)
        saved.read_part(stored, Box((row, first), (rows, last - first)), weight)
        found = layer.quantise(weight)[key]
        view.copy_(found.narrow(1, column - first // per_entry, columns))
