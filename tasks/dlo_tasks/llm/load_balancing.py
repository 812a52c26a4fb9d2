"""Computes the load-balancing loss of a mixture of experts, with transformers' function for the model's family.

Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity. Fedus et al., 2021,
arXiv 2101.03961, equations 4 to 6; here over the router logits of all blocks together.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dlo_framework.errors import DloError
from dlo_tasks.llm.language_models import find_base_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
