"""Selects what trains: freezes parameters by name, adds low-rank adapters (LoRA), holds their base weights in 4 bits.

LoRA: Low-Rank Adaptation of Large Language Models. Hu et al., 2021, arXiv 2106.09685; implemented by peft.
DoRA: Weight-Decomposed Low-Rank Adaptation. Liu et al., 2024, arXiv 2402.09353; implemented by peft.
QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023, arXiv 2305.14314. Its layer and the departures:
:mod:`dlo_framework.models.four_bit_linear`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dlo_framework.checkpoint import LazyStateDict
from dlo_framework.errors import DloError, check_number, did_you_mean
from dlo_framework.models.four_bit_linear import LEVELS, FourBitLinear, Kind
from dlo_framework.plan import ParallelPlan, Rule
from dlo_framework.shards import Box, Shard, held_boxes
from dlo_tasks.language.language_models import ModelKind, find_blocks, require_package, text_config

#: peft's name of the only adapter.
ADAPTER = "default"


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: `W x + (alpha / rank) B A x`, where only A `[rank, in]` and B `[out, rank]` train.

    Args:
        rank: Rank of the adapters.
        alpha: Scale of the adapters, times the rank; default twice the rank.
        dropout: Dropout rate of the adapters' inputs.
        targets: Last parts of the names of the modules to adapt, such as `[q_proj, v_proj]`; by default every
            projection in the blocks.
        dora: Whether to train the norm of each output feature's weights too (DoRA): the adapters then change their
            direction only.
        base: Levels of the frozen weights in the blocks: `nf4` or `int4`, 4 bits each with one scale for every
            `base_block` input features (QLoRA); None keeps them in the model's dtype.
        base_block: Number of input features that share a scale.
        double_quantisation: Whether the scales are quantised too, to 8 bits (QLoRA): 4.13 bits a weight with a block of
            64, in place of 4.25.
        merge: Whether an export merges the adapters into the weights; otherwise it writes the adapters only.

    Raises:
        DloError: If a value is out of range.
    """

    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    targets: list[str] | None = None
    dora: bool = False
    base: Literal["nf4", "int4"] | None = None
    base_block: int = 64
    double_quantisation: bool = False
    merge: bool = True

    def __post_init__(self) -> None:
        check_number("lora.rank", self.rank, "at least 1", "8 is usual")
        check_number("lora.dropout", self.dropout, "at least 0 and below 1", "0 disables it")
        check_number("lora.alpha", self.alpha, "above 0", f"{2 * self.rank} is usual")
        if self.base is not None and self.base not in LEVELS:
            hint = did_you_mean(self.base, LEVELS) or "; leave it out"
            raise DloError(f"lora.base must be {' or '.join(LEVELS)}, got {self.base}{hint}")
        if self.base_block < 2 or self.base_block % 2:
            raise DloError(f"lora.base_block must be even and at least 2, got {self.base_block}; 64 is usual")
        if self.double_quantisation and self.base is None:
            raise DloError(
                "lora.double_quantisation must be false without 4-bit base weights, got true; set lora.base: nf4, or"
                " leave it out"
            )
        if self.targets is not None and not self.targets:
            raise DloError(
                "lora.targets must name at least one projection, got []; name some, or remove it to adapt all"
            )

    def peft_config(
        self, targets: Sequence[str], kind: ModelKind = "causal", *, transposed: bool, base: str | None = None
    ) -> Any:
        """Returns peft's config of these adapters.

        Args:
            targets: Last parts of the names of the modules to adapt.
            kind: Kind of the model.
            transposed: Whether weights are `[in, out]`, as in GPT-2.
            base: Folder or hub name of the base model.
        """
        peft = require_package("peft")
        return peft.LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank if self.alpha is None else self.alpha,
            lora_dropout=self.dropout,
            target_modules=list(targets),
            fan_in_fan_out=transposed,
            use_dora=self.dora,
            task_type={"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}.get(kind),
            base_model_name_or_path=base,
        )


def projections(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the projections that LoRA can adapt, by name."""
    from transformers.pytorch_utils import Conv1D

    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def lora_targets(model: nn.Module, head: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Returns the last parts of the names of the modules to adapt.

    Args:
        model: Model without adapters.
        head: Output projection, which `targets` may name, and which the default leaves out.
        targets: Targets that the user has set, or None.

    Raises:
        DloError: If a target matches no projection; the message has the nearest name.
    """
    by_name = projections(model)
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name, module in by_name.items() if module is not head))
    if targets is None:
        return leaves
    every = list(dict.fromkeys(name.rpartition(".")[2] for name in by_name))
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in by_name):
            hint = did_you_mean(target, every)
            raise DloError(f"lora.targets must be among {', '.join(every)}, got {target}{hint or '; change it'}")
    return list(targets)


def add_adapters(model: nn.Module, head: nn.Module, lora: Lora, dtype: torch.dtype, kind: ModelKind = "causal") -> None:
    """Adds adapters to a model's projections, in place, and freezes all other parameters.

    Args:
        model: Model of transformers.
        head: Output projection of the model.
        lora: Options of the adapters.
        dtype: Dtype of the adapters; the model's may be a half precision.
        kind: Kind of the model.

    Raises:
        DloError: If a target is unknown.
    """
    from transformers.pytorch_utils import Conv1D

    targets = lora_targets(model, head, lora.targets)
    transposed = any(isinstance(module, Conv1D) for module in projections(model).values())
    require_package("peft").inject_adapter_in_model(
        lora.peft_config(targets, kind, transposed=transposed), model, ADAPTER
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if lora.base is not None:
        quantise_base(model, lora.base, lora.base_block, lora.double_quantisation)


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes modules and parameters by patterns, dotted names with `*` (see :mod:`dlo_framework.plan`).

    Raises:
        DloError: If a pattern matches nothing, or no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    parts = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
    for pattern in patterns:
        plan = ParallelPlan(tensor={pattern: Rule.COLUMN})
        frozen = [name for name in names if plan.rule_for(name) is Rule.COLUMN]
        if not frozen:
            raise DloError(
                f"freeze must match parameters of the model, got '{pattern}'"
                f"{did_you_mean(pattern, parts) or '; remove it'}"
            )
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise DloError(f"freeze must leave a parameter to train, got {list(patterns)}; remove a pattern")


def freeze_unused_by_text(model: Any) -> None:
    """Freezes the parameters that text does not reach, such as a vision tower, because they never get gradients."""
    if text_config(model.config) is model.config or model.config.is_encoder_decoder:
        return
    decoder = model.get_decoder()
    used = {id(parameter) for part in (decoder, model.get_output_embeddings()) for parameter in part.parameters()}
    if any(parameter is model.get_input_embeddings().weight for parameter in decoder.parameters()):
        for parameter in model.parameters():
            if id(parameter) not in used:
                parameter.requires_grad_(False)


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Returns a model's adapted modules by name."""
    peft = require_package("peft")
    kind = peft.tuners.tuners_utils.BaseTunerLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switches a model's adapters off inside the block, so that it computes as its base model.

    A reach into peft (0.15 to 0.21), whose `enable_adapters(False)` also freezes the adapters: strategies that have
    sharded their parameters must not see that.
    """
    layers = list(adapter_layers(model).values())
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merge_adapters(model: nn.Module) -> None:
    """Merges the adapters into the base weights and removes them, in place; 4-bit weights are dequantised before."""
    dequantise_base(model)
    for name, layer in adapter_layers(model).items():
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the adapters' weights, under the names that `peft.PeftModel.from_pretrained` reads."""
    state = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            # DoRA's magnitude, a weight of a module, has the name of the module.
            name = name.replace(f".lora_magnitude_vector.{ADAPTER}.weight", ".lora_magnitude_vector")
            state[f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"] = tensor.detach().contiguous()
    return state


# --- base weights in 4 bits ----------------------------------------------------------------------------------


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
        quantised = layer.quantise(weight.t().contiguous() if layer.transposed else weight)[key]
        view.copy_(quantised.narrow(1, column - first // per_entry, columns))
