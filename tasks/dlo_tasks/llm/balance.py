"""The loss that keeps a mixture's experts equally busy, as transformers has it for the model's family.

Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity. Fedus et al., 2021,
arXiv 2101.03961, equations 4 to 6; over the router's logits of all blocks together.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dlo_framework.errors import DloError
from dlo_tasks.llm.models import base_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What transformers (5.17 to 5.23) calls the loss, in the file of each family that has it, and what it is given.
_FUNCTION = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class Balance:
    """How much experts should be balanced, and how that is measured.

    Attributes:
        coefficient: `router_aux_loss_coef` of the config.
        measure: transformers' function; told the routers' logits, `[B * L, experts]` each, and the mask.
    """

    coefficient: float
    measure: Callable[[tuple[Tensor, ...], Tensor | None], Tensor]

    def hidden_states(self, model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns what the head is given, `[B, L, D]`, and the loss of the batch times its coefficient, a scalar.

        Raises:
            DloError: if the routers' logits do not come out of the model.
        """
        found = base_of(model)(**inputs, use_cache=False, output_router_logits=True)
        logits = getattr(found, "router_logits", None)
        if not logits:
            raise DloError(
                f"the load-balancing loss needs the routers' logits, which {type(model).__name__} has not given; set"
                " config.output_router_logits: false"
            )
        mask = inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:  # one of documents: all tokens count
            mask = None
        return found[0], self.coefficient * self.measure(tuple(logits), mask)


def balance_of(model: PreTrainedModel) -> Balance | None:
    """Returns how a model's experts are balanced; None where its config does not ask for it.

    Raises:
        DloError: if it does, and the family has no such loss.
    """
    config: Any = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return None
    function = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
    names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    coefficient, experts, top_k = (getattr(model, name, None) for name in names)
    if function is None or list(inspect.signature(function).parameters) != _ARGUMENTS or None in (coefficient, experts):
        raise DloError(
            f"config.output_router_logits: true adds a load-balancing loss, which {type(model).__name__} does not have"
            " as mixtral and qwen3_moe have it; set it to false"
        )
    if not coefficient:
        return None
    return Balance(float(coefficient), lambda logits, mask: function(logits, experts, top_k, mask))
