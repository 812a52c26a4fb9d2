"""What of a model trains: all of it, what no pattern freezes, or low-rank adapters beside its frozen weights.

LoRA: Low-Rank Adaptation of Large Language Models. Hu et al., 2021, arXiv 2106.09685; peft does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.plan import ParallelPlan, Rule
from dlo_tasks.llm.models import require, text_config

#: peft's name of the one adapter.
ADAPTER = "default"


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: `W x + (alpha / rank) B A x`, of which A `[rank, in]` and B `[out, rank]` train.

    Args:
        rank: of the adapters.
        alpha: their scale times the rank; by default twice the rank.
        dropout: of what goes into an adapter.
        targets: last parts of the names of the modules to adapt, such as `[q_proj, v_proj]`; by default every
            projection in the blocks.
        merge: whether an export adds the adapters to the weights; otherwise it holds the adapters alone.

    Raises:
        DloError: for numbers that cannot be.
    """

    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    targets: list[str] | None = None
    merge: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise DloError(f"lora: rank is at least 1, given {self.rank}; 8 is usual")
        if not 0 <= self.dropout < 1:
            raise DloError(f"lora: dropout lies in [0, 1), given {self.dropout}")
        if self.alpha is not None and self.alpha <= 0:
            raise DloError(f"lora: alpha is positive, given {self.alpha}; twice the rank is usual")
        if self.targets is not None and not self.targets:
            raise DloError("lora: targets is empty; name projections, or leave it out to adapt all of them")

    def peft_config(self, targets: Sequence[str], *, transposed: bool, base: str | None = None) -> Any:
        """Returns peft's config of these adapters.

        Args:
            targets: last parts of the names of the modules to adapt.
            transposed: whether weights are `[in, out]`, as in GPT-2.
            base: the folder or name of the model that they adapt.
        """
        peft = require("peft")
        return peft.LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank if self.alpha is None else self.alpha,
            lora_dropout=self.dropout,
            target_modules=list(targets),
            fan_in_fan_out=transposed,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )


def projections(model: nn.Module) -> dict[str, nn.Module]:
    """Returns a model's matrix products by name; those that LoRA can adapt."""
    from transformers.pytorch_utils import Conv1D

    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def lora_targets(model: nn.Module, head: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Returns the last parts of the names of the modules to adapt.

    Args:
        model: not adapted yet.
        head: its output projection, which `targets` may name, and which is left out by default.
        targets: as the user has given them.

    Raises:
        DloError: for one that no projection is called; with the nearest name.
    """
    found = projections(model)
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name, module in found.items() if module is not head))
    if targets is None:
        return leaves
    every = list(dict.fromkeys(name.rpartition(".")[2] for name in found))
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in found):
            hint = did_you_mean(target, every)
            raise DloError(f"lora: no projection is called '{target}'{hint}; there are {', '.join(every)}")
    return list(targets)


def adapt(model: nn.Module, head: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Puts adapters beside a model's projections, in place, and freezes all else.

    Args:
        model: of transformers.
        head: its output projection.
        lora: how.
        dtype: of the adapters; the model's may be a half precision.

    Raises:
        DloError: for an unknown target.
    """
    from transformers.pytorch_utils import Conv1D

    targets = lora_targets(model, head, lora.targets)
    transposed = any(isinstance(module, Conv1D) for module in projections(model).values())
    require("peft").inject_adapter_in_model(lora.peft_config(targets, transposed=transposed), model, ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes what patterns match, each a dotted name with `*` (see :mod:`dlo_framework.plan`), and all below it.

    Raises:
        DloError: for a pattern that matches nothing, and if nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    parts = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
    for pattern in patterns:
        frozen = [name for name in names if _owns(pattern, name)]
        if not frozen:
            raise DloError(f"freeze: '{pattern}' matches nothing in the model{did_you_mean(pattern, parts)}")
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise DloError(f"freeze: {list(patterns)} leave nothing to train; take one out")


def freeze_beside_text(model: Any) -> None:
    """Freezes the parameters that tokens alone do not reach, such as a vision tower: no step has gradients for them."""
    if text_config(model.config) is model.config:
        return
    decoder = model.get_decoder()
    used = {id(parameter) for part in (decoder, model.get_output_embeddings()) for parameter in part.parameters()}
    if any(parameter is model.get_input_embeddings().weight for parameter in decoder.parameters()):
        for parameter in model.parameters():
            if id(parameter) not in used:
                parameter.requires_grad_(False)


def recompute(model: Any) -> None:
    """Makes the blocks of a model keep their inputs alone for backward; what they compute in between is made again.

    transformers 5.23 calls it activation checkpointing, versions before it gradient checkpointing.
    """
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _owns(pattern: str, name: str) -> bool:
    return ParallelPlan(tensor={pattern: Rule.COLUMN}).rule_for(name) is Rule.COLUMN


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Returns a model's adapted modules by name."""
    peft = require("peft")
    kind = peft.tuners.tuners_utils.BaseTunerLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def merge(model: nn.Module) -> None:
    """Adds the adapters to the weights they stand beside, and takes them away, in place."""
    for name, layer in adapter_layers(model).items():
        layer.merge(safe_merge=True)
        model.set_submodule(name, layer.get_base_layer())


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the adapters' weights under the names by which `peft.PeftModel.from_pretrained` finds them."""
    return {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if ".lora_" in name
    }
