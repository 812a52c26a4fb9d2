"""Dtypes in which parameters are gathered: their names in configs, and the default of a device and a precision."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dlo_framework.errors import DloError, check_choice

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
