"""Dtypes in which parameters are gathered and kept: their names in configs, defaults, and the option `bf16_weights`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dlo_framework.errors import DloError, check_choice
from dlo_plugins.parallel.stochastic_rounding import StochasticSteps

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT = {"fp32": "float32", "32": "float32", "bf16": "bfloat16", "fp16": "float16", "16": "float16"}


def parse_dtype(option: str, name: str | None) -> torch.dtype | None:
    """Returns the dtype that a config names.

    Args:
        option: Name of the option, for the message.
        name: Name of the dtype, or None.

    Raises:
        DloError: The name is unknown.
    """
    if name is None:
        return None
    name = _SHORT.get(name, name).removeprefix("torch.")
    check_choice(option, name, DTYPES)
    return DTYPES[name]


def default_param_dtype(precision: str, device: torch.device, module: nn.Module | None = None) -> str | None:
    """Returns the default dtype in which parameters are gathered; None for their own.

    Args:
        precision: Precision of the Trainer.
        device: Device on which this rank computes.
        module: Module that would be gathered in it, if the dtype is for all of its parameters. A module with batch norm
            keeps single precision: batch norm rejects weights in half precision beside statistics in single precision.
    """
    if precision != "bf16-mixed" or device.type == "cpu":
        return None
    return None if module is not None and find_batch_norms(module) else "bfloat16"


def find_batch_norms(module: nn.Module) -> list[nn.Module]:
    """Returns the batch norms in a module; their kernels reject half-precision weights beside other statistics."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def check_sent_dtype(given: str | None, dtype: torch.dtype) -> None:
    """Checks that `reduce_dtype` does not contradict a callback that sends gradients in half precision.

    Args:
        given: Value of the option; None if it is unset.
        dtype: Dtype of the callback.

    Raises:
        DloError: The option sets another dtype.
    """
    if parse_dtype("reduce_dtype", given) not in (None, dtype):
        name = str(dtype).removeprefix("torch.")
        raise DloError(
            f"reduce_dtype must be {name} or unset beside a callback that sends gradients in it, got {given}; leave one"
            " of the two out"
        )


Bf16Weights = Literal["masters", "stochastic"]
#: Precisions of the Trainer by value of the option.
_PRECISIONS = {"masters": ("bf16-mixed",), "stochastic": ("bf16-mixed", "bf16-true")}


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
