"""Mixtures of experts in place of the MLPs of transformers' dense models, and the load-balancing loss of a mixture.

Sparse Upcycling: arXiv 2212.05055. The loss is computed with transformers' function for the model's family: Switch
Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity. Fedus et al., 2021, arXiv
2101.03961, equations 4 to 6; here over the router logits of all blocks together.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.experts.balance import check_routers, find_routers, limit_capacity
from dlo_framework.experts.layer import DenseMLP, upcycle
from dlo_framework.experts.mixture_options import MixtureOptions
from dlo_tasks.llm.language_models import find_base_model, find_blocks

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


#: Name and arguments of the loss in transformers (5.17 to 5.23), in the module of each family that has it.
_FUNCTION = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class LoadBalancing:
    """Load-balancing loss of a model: its coefficient and its function.

    Attributes:
        coefficient: Value of `router_aux_loss_coef` in the config.
        measure: Function of transformers, of the router logits, `[B * L, experts]` each, and the mask.
    """

    coefficient: float
    measure: Callable[[tuple[Tensor, ...], Tensor | None], Tensor]

    def hidden_states(self, model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the hidden states, `[B, L, D]`, and the batch's loss times its coefficient, a scalar.

        Raises:
            DloError: If the model does not return router logits.
        """
        found = find_base_model(model)(**inputs, use_cache=False, output_router_logits=True)
        logits = getattr(found, "router_logits", None)
        if not logits:
            raise DloError(
                "config.output_router_logits must be false for models that return no router logits, got true for"
                f" {type(model).__name__}; set config.output_router_logits: false"
            )
        mask = inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:  # A mask of documents: all tokens count.
            mask = None
        return found[0], self.coefficient * self.measure(tuple(logits), mask)


def find_load_balancing(model: PreTrainedModel) -> LoadBalancing | None:
    """Returns a model's load-balancing loss, or None where its config does not set one.

    Raises:
        DloError: If the config sets one, and the family does not have it.
    """
    config: Any = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return None
    function = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
    names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    coefficient, experts, top_k = (getattr(model, name, None) for name in names)
    if function is None or list(inspect.signature(function).parameters) != _ARGUMENTS or None in (coefficient, experts):
        raise DloError(
            "config.output_router_logits must be false for families without the load-balancing loss of mixtral and"
            f" qwen3_moe, got true for {type(model).__name__}; set config.output_router_logits: false"
        )
    if not coefficient:
        return None
    return LoadBalancing(float(coefficient), lambda logits, mask: function(logits, experts, top_k, mask))
