"""Modules whose features or channels ranks divide: projections, their adapters, and what is between convolutions.

Batch norms, and convolutions of several groups, compute with each channel, or group of channels, alone. Between a
convolution whose output channels are divided and one whose input channels are, each rank computes them for its own
channels. The mean and variance of a batch norm are those of a channel, so that no rank needs another's, and running
statistics are slices too.

LoRA: Low-Rank Adaptation of Large Language Models. Hu et al., 2021, arXiv 2106.09685.
DoRA: Weight-Decomposed Low-Rank Adaptation. Liu et al., 2024, arXiv 2402.09353.

An adapter adds `s B A x` to a projection `W x`, with A `[rank, in]` and B `[out, rank]`. Of a column projection, B is
sharded with the rows of W, and A is replicated: its gradient is a partial sum. Of a row projection, A is sharded with
the columns of W, and B is replicated: the rank's `W x + s B A x` is a partial sum, which one all-reduce completes.
DoRA's magnitudes belong to the rows of W. The norm of a row of a row projection is over all ranks. The modules are
peft's (0.15 to 0.21): a wrapper with `base_layer`, `lora_A` and `lora_B`. Its forward is not replaced.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.models.four_bit_linear import FourBitLinear
from dlo_framework.models.hugging_face import is_conv1d
from dlo_plugins.parallel.tensor.tp_plan import TPPlan


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


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
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
    if is_conv1d(module):
        return _CONV1D
    raise DloError(
        f"projection '{name}' must be Linear, Conv2d of one group or Conv1D for tensor parallelism, got"
        f" {type(module).__name__}; remove it from the plan's tensor rules"
    )


def check_row(name: str, module: nn.Module) -> None:
    """Checks that a row projection computes what Linear does: ranks compute the product in place of its forward.

    Raises:
        DloError: It has a forward of its own, with another result.
    """
    own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    if own and not _computes_product(module):
        raise DloError(
            f"row projection '{name}' must compute what nn.Linear does, got the forward of {type(module).__name__}; put"
            " what it adds into a module around the projection, or remove it from the plan's tensor rules"
        )


def _computes_product(module: Any) -> bool:
    """Returns whether a subclass of Linear computes its product, by a copy's; True where that cannot run."""
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    inputs = torch.linspace(-1, 1, 2 * module.in_features).view(2, -1)
    with torch.no_grad(), contextlib.suppress(RuntimeError, TypeError):  # Tensors without values, or more arguments.
        for tensor in (*trial.parameters(), *trial.buffers()):
            tensor.copy_(torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape))
        return torch.allclose(trial(inputs), F.linear(inputs, trial.weight, trial.bias), rtol=1e-3)
    return True


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
        module: Any = self
        if isinstance(module, FourBitLinear):
            return module.multiply(x)
        if isinstance(module, nn.Conv2d):
            return module._conv_forward(x, module.weight, None)
        return F.linear(x, module.weight if isinstance(module, nn.Linear) else module.weight.t())


def is_channelwise(module: nn.Module) -> bool:
    """Returns whether a module computes with each channel, or group of channels, alone."""
    return isinstance(module, _BATCH_NORMS) or (isinstance(module, _CONVOLUTIONS) and module.groups > 1)


def channel_count(module: nn.Module) -> int:
    """Returns the number of channels, or groups of them, that can be divided."""
    return int(module.groups if isinstance(module, _CONVOLUTIONS) else module.num_features)  # type: ignore[arg-type]


def set_channel_counts(module: nn.Module, ranks: int) -> None:
    """Sets a module's numbers of channels to one rank's.

    Args:
        module: Module with a rank's parameters and buffers.
        ranks: Number of ranks.
    """
    for key in ("groups", "in_channels", "out_channels") if isinstance(module, _CONVOLUTIONS) else ("num_features",):
        setattr(module, key, getattr(module, key) // ranks)


#: Attribute of sharded modules with their region, which has a communicator.
REGION = "tensor_region"


def is_adapted(module: Any) -> bool:
    """Returns whether a module is PEFT's wrapper of a projection with adapters."""
    return hasattr(module, "base_layer")


def base_of(module: Any) -> Any:
    """Returns the projection inside a wrapper with adapters; any other module itself."""
    return module.base_layer if is_adapted(module) else module


def base_name(name: str, module: nn.Module) -> str:
    """Returns the name of :func:`base_of`, for a module of this name."""
    return f"{name}.base_layer" if is_adapted(module) else name


def adapter_kinds(name: str, module: nn.Module) -> dict[str, str]:
    """Returns the kinds of the parameters of a wrapper's adapters, by name; none of a projection without adapters.

    Args:
        name: Name of the wrapper.
        module: Wrapper.

    Raises:
        DloError: The adapters are of another kind than LoRA and DoRA.
    """
    if not is_adapted(module):
        return {}
    kinds = {key: key.split(".")[0] for key, _ in module.named_parameters() if not key.startswith("base_layer.")}
    known = {*kinds.values()}
    if not {"lora_A", "lora_B"} <= known or known - {"lora_A", "lora_B", "lora_magnitude_vector"}:
        raise DloError(
            f"adapters of '{name}' must be LoRA or DoRA for tensor parallelism, got {type(module).__name__} with"
            f" {', '.join(sorted(known))}; set tp=1"
        )
    return kinds


def divide_adapters(tp_plan: TPPlan, name: str, kinds: dict[str, str], pieces: tuple[int, ...], *, row: bool) -> None:
    """Adds the divisions of a wrapper's adapters to a plan, and those that are replicated to the partial parameters.

    Args:
        tp_plan: Tensor-parallel plan.
        name: Name of the wrapper.
        kinds: Kinds of its adapters, of :func:`adapter_kinds`.
        pieces: Slices of the features that the ranks share: outputs of a column projection, inputs of a row projection.
        row: Whether it is a row projection.
    """
    for key, kind in kinds.items():
        if row == (kind == "lora_A"):
            tp_plan.divide(f"{name}.{key}", int(row), *pieces)
        else:
            tp_plan.partial.add(f"{name}.{key}")


def set_features(module: Any) -> None:
    """Sets the numbers of features of a wrapper and of its adapters to those of their weights."""
    for linear in (*module.lora_A.values(), *module.lora_B.values()):
        linear.out_features, linear.in_features = linear.weight.shape
    module.in_features = next(iter(module.lora_A.values())).in_features
    module.out_features = next(iter(module.lora_B.values())).out_features


class InnerRowProjection(RowProduct):
    """Mixin for the class of the projection inside a row wrapper, whose bias is added to the ranks' sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's partial sum."""
        return self.product(x)


class ShardedRowNorms:
    """Mixin for the class of peft's DoRA layer of a row projection, whose rows are sharded."""

    def get_weight_norm(self, weight: Tensor, lora_weight: Tensor, scaling: float, **options: Any) -> Tensor:
        """Returns the norms of the full rows; the arguments are this rank's slices."""
        own: Tensor = super().get_weight_norm(weight, lora_weight, scaling, **options)  # type: ignore[misc]
        communicator: Communicator = self.__dict__[REGION].communicator
        return communicator.sum(own.detach().square()).sqrt()

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Returns the addition to the base result, from which peft would subtract a bias that it does not have."""
        if options["base_layer"].bias is not None:
            options["base_result"] = None
        addition: Tensor = super().forward(x, **options)  # type: ignore[misc]
        return addition


def install_row_adapters(module: Any, region: Any) -> None:
    """Makes a row wrapper compute this rank's partial sum.

    Args:
        module: Wrapper; classes inside it are replaced by derived ones.
        region: Region of the wrapper.
    """
    mix_in(InnerRowProjection, module.base_layer, region)
    for layer in getattr(module, "lora_magnitude_vector", {}).values():
        mix_in(ShardedRowNorms, layer, region)


def mix_in(mixin: type, module: nn.Module, region: Any) -> None:
    """Gives a module a region, and replaces its class by a derived one, as torch's `fully_shard` does.

    So names, hooks and `isinstance` still work.

    Args:
        mixin: Class whose methods come before those of the module's own.
        module: Module.
        region: Region, or other state, under the attribute :data:`REGION`.
    """
    module.__dict__[REGION] = region
    module.__class__ = _derived(mixin, type(module))  # type: ignore[arg-type]


@functools.cache
def _derived(mixin: Any, cls: Any) -> type[nn.Module]:
    return type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), {})
