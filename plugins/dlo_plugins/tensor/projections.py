"""The kinds of modules that hold a projection, and along which dims their tensors lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.errors import DloError


@dataclass(frozen=True)
class Kind:
    """A kind of projection.

    Attributes:
        out_dim: of the weight.
        in_dim: of the weight.
        outputs: the module's attributes that say how many features come out.
        inputs: and how many go in.
    """

    out_dim: int
    in_dim: int
    outputs: str
    inputs: str


_LINEAR = Kind(0, 1, "out_features", "in_features")
_CONVOLUTION = Kind(0, 1, "out_channels", "in_channels")
#: transformers' Conv1D (GPT-2), a linear layer with its weight the other way round.
_CONV1D = Kind(1, 0, "nf", "nx")


def kind_of(name: str, module: nn.Module) -> Kind:
    """Returns the kind of a projection.

    Raises:
        DloError: for a module that tensor parallelism cannot cut.
    """
    if isinstance(module, nn.Linear) and not hasattr(module, "base_layer"):
        return _LINEAR
    if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.groups == 1:
        return _CONVOLUTION
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return _CONV1D
    if hasattr(module, "base_layer"):
        raise DloError(
            f"tensor parallelism cannot cut '{name}', which adapters change ({type(module).__name__}); use tp=1, or"
            " train without lora"
        )
    raise DloError(
        f"tensor parallelism cuts Linear, 1x1 Conv2d and Conv1D, but '{name}' is {type(module).__name__}; take it out"
        " of the plan's tensor rules"
    )


def product(module: Any, x: Tensor) -> Tensor:
    """Returns a projection's output without its bias."""
    if isinstance(module, nn.Linear):
        return F.linear(x, module.weight)
    if isinstance(module, nn.Conv2d):
        return module._conv_forward(x, module.weight, None)
    return F.linear(x, module.weight.t())


def add_bias(module: Any, x: Tensor) -> Tensor:
    """Returns a projection's output with its bias, in the output's dtype."""
    if module.bias is None:
        return x
    bias = module.bias.to(x.dtype)
    return x + (bias[:, None, None] if isinstance(module, nn.Conv2d) else bias)
