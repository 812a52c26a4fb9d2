"""Kinds of projection modules, with the output and input dims of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.four_bit_linear import FourBitLinear


@dataclass(frozen=True)
class ProjectionKind:
    """Kind of projection module.

    Attributes:
        out_dim: Output dim of the weight.
        in_dim: Input dim of the weight.
        outputs: Module attribute with the number of output features.
        inputs: Module attribute with the number of input features.
    """

    out_dim: int
    in_dim: int
    outputs: str
    inputs: str


_LINEAR = ProjectionKind(0, 1, "out_features", "in_features")
_CONVOLUTION = ProjectionKind(0, 1, "out_channels", "in_channels")
#: transformers' Conv1D (GPT-2), a linear layer with a transposed weight.
_CONV1D = ProjectionKind(1, 0, "nf", "nx")


def projection_kind(name: str, module: nn.Module) -> ProjectionKind:
    """Returns the kind of a projection.

    Raises:
        DloError: If tensor parallelism cannot shard the module.
    """
    if isinstance(module, nn.Linear | FourBitLinear):
        return _LINEAR
    # A row projection of more than a pixel runs torch's forward, not that of a subclass, such as another padding.
    is_known = isinstance(module, nn.Conv2d) and type(module).forward is nn.Conv2d.forward
    if isinstance(module, nn.Conv2d) and module.groups == 1 and (is_known or module.kernel_size == (1, 1)):
        return _CONVOLUTION
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return _CONV1D
    raise DloError(
        f"projection '{name}' must be Linear, Conv2d of one group or Conv1D for tensor parallelism, got"
        f" {type(module).__name__}; remove it from the plan's tensor rules"
    )


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters that are a projection's weight, and have its input features."""
    return ("codes", "scales") if isinstance(module, FourBitLinear) else ("weight",)


def output_names(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters that have a projection's output features, but its bias."""
    is_double = isinstance(module, FourBitLinear) and module.quantises_scales
    return (*weight_names(module), "scale_ranges") if is_double else weight_names(module)


def set_feature_counts(name: str, module: nn.Module) -> None:
    """Sets a projection's numbers of features to those of its weight."""
    kind = projection_kind(name, module)
    weight = module.get_parameter(weight_names(module)[0])
    setattr(module, kind.outputs, weight.shape[kind.out_dim])
    setattr(module, kind.inputs, weight.shape[kind.in_dim] * (2 if isinstance(module, FourBitLinear) else 1))


def apply_without_bias(module: Any, x: Tensor) -> Tensor:
    """Returns a projection's output without its bias."""
    if isinstance(module, FourBitLinear):
        return module.multiply(x)
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


class RowProduct:
    """Mixin for the class of a projection whose output is a partial sum, without its bias."""

    def product(self, x: Tensor) -> Tensor:
        """Returns this rank's partial sum, without the bias."""
        return apply_without_bias(self, x)
