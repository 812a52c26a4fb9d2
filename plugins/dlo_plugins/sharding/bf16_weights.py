"""Option `bf16_weights` of strategies: bf16 weights with master weights, or with stochastic rounding and none."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import nn

from dlo_framework.errors import DloError, did_you_mean
from dlo_plugins.sharding.gathered_dtype import find_batch_norms, parse_dtype
from dlo_plugins.sharding.stochastic_rounding import StochasticSteps

Bf16Weights = Literal["masters", "stochastic"]
#: Precisions of the Trainer by value of the option.
_PRECISIONS = {"masters": ("bf16-mixed",), "stochastic": ("bf16-mixed", "bf16-true")}


def check_value(value: Any) -> None:
    """Checks the option's value.

    Raises:
        DloError: It is unknown.
    """
    known = get_args(Bf16Weights)
    if value is not None and value not in known:
        raise DloError(f"bf16_weights must be {' or '.join(known)}, got '{value}'{did_you_mean(str(value), known)}")


def check_precision(value: Bf16Weights | None, precision: str, param_dtype: str | None) -> None:
    """Checks the option against the Trainer's precision and the strategy's `param_dtype`.

    Raises:
        DloError: They contradict each other.
    """
    if value is None:
        return
    if precision not in _PRECISIONS[value]:
        wanted = _PRECISIONS[value]
        why = "" if precision != "bf16-true" else ", which rounds the weights before masters are made"
        raise DloError(
            f"precision must be {' or '.join(wanted)} with bf16_weights {value}, got {precision}{why}; set"
            f" trainer.precision: {wanted[0]}, or leave bf16_weights out"
        )
    if parse_dtype("param_dtype", param_dtype) not in (None, torch.bfloat16):
        raise DloError(f"param_dtype must be bfloat16 with bf16_weights, got {param_dtype}; leave one of the two out")


def find_exact_parameters(module: nn.Module) -> set[int]:
    """Returns the ids of the parameters that stay in single precision: those of batch norms."""
    return {id(parameter) for norm in find_batch_norms(module) for parameter in norm.parameters()}


def convert_weights(module: nn.Module) -> None:
    """Converts a module's parameters in single precision to bf16 in place, except those of batch norms."""
    exact = find_exact_parameters(module)
    for parameter in module.parameters():
        if parameter.dtype == torch.float32 and id(parameter) not in exact:
            parameter.data = parameter.data.bfloat16()


def prepare_weights(value: Bf16Weights | None, module: Any) -> StochasticSteps | None:
    """Converts a LightningModule's weights for stochastic rounding; returns the steps' rounding, None without it."""
    if value != "stochastic":
        return None
    convert_weights(module)
    return StochasticSteps(lambda: module.trainer.global_step)
