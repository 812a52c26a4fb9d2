"""Mixtures of experts in place of the MLPs of transformers' dense models: sparse upcycling, arXiv 2212.05055."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.experts.balance import check_routers, find_routers
from dlo_framework.experts.capacity import limit_capacity
from dlo_framework.experts.mixture_options import MixtureOptions
from dlo_framework.experts.upcycling import DenseMLP, upcycle
from dlo_tasks.llm.language_models import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Linear layers of the MLPs of most families: Llama, Qwen, Mistral, Gemma, OLMo, ...
_GATED = ("gate_proj", "up_proj", "down_proj")


def check_options(options: MixtureOptions | None, config: Any, lora: Any) -> None:
    """Checks the option `experts` against the model's config.

    Raises:
        DloError: If they contradict each other.
    """
    if options is None:
        return
    if options.router == "expert_choice":
        raise DloError(
            "experts.router must be softmax or sigmoid for a causal model, got expert_choice, which selects tokens by"
            " later ones; set router: softmax"
        )
    if options.count is not None and lora is not None:
        raise DloError("experts.count must be unset with lora, which freezes the experts; remove lora")
    if options.aux_loss and getattr(config.get_text_config(), "output_router_logits", False):
        raise DloError(
            f"experts.aux_loss must be 0 with config.output_router_logits, which adds transformers' own, got"
            f" {options.aux_loss}; remove output_router_logits"
        )


def install_mixtures(model: PreTrainedModel, options: MixtureOptions | None, *, reads_weights: bool) -> None:
    """Replaces MLPs by mixtures, or checks the mixtures that the model has and limits their capacity.

    Args:
        model: Model, also on the meta device.
        options: Option `experts`; None does nothing.
        reads_weights: Whether the model's weights are read after this.

    Raises:
        DloError: If the model has none, or its MLPs cannot be copied.
    """
    if options is None:
        return
    if options.count is None:
        check_routers(model, options)
        if options.capacity_factor is not None:
            limit_capacity(model, options.capacity_factor)
        return
    if find_routers(model):
        raise DloError(
            f"experts.count must be unset for a model with mixtures, got {options.count} for {type(model).__name__};"
            " set its experts in config"
        )
    if reads_weights:
        raise DloError(
            "experts.count must be unset under meta_init with a trained model, whose dense weights are read after"
            f" sharding, got {options.count}; remove meta_init"
        )
    name, blocks = find_blocks(model)
    mlps = [f"{name}.{number}.{child}" for number, block in enumerate(blocks) for child in _mlps(block)]
    with torch.no_grad():
        upcycle(model, mlps, read_mlp, options)


def _mlps(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_children() if read_mlp(module) is not None]


def read_mlp(mlp: nn.Module) -> DenseMLP | None:
    """Returns the linear layers of a gated MLP of transformers (5.24); None for others."""
    gate, up, down = (getattr(mlp, name, None) for name in _GATED)
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    activation = getattr(mlp, "act_fn", None)
    if activation is None or len({layer.bias is None for layer in (gate, up, down)}) > 1:
        return None
    return DenseMLP(up, down, activation, gate)
