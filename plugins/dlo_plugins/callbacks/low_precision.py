"""Implements int8 mixed-precision training as an applier: the products of the blocks' linear layers are int8.

SwitchBack: Stable and low-precision training for large-scale vision-language models. Wortsman et al., 2023,
arXiv 2304.13013. Departures: see :mod:`dlo_plugins.quantisation.int8_products`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dlo_framework.applier import Applier, Phase
from dlo_framework.errors import DloError, did_you_mean

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from dlo_framework.plan import ParallelPlan

#: Least compute capability of a CUDA device with int8 matrix products.
_CAPABILITY = (7, 5)


class LowPrecision(Applier):
    """Computes the products of linear layers in int8, forward and backward; weights and gradients keep their dtypes.

    Each row of either factor has its scale: a token, an output feature. Only layers inside the plan's blocks are
    changed, so head and stem stay as they are; so do layers with fewer than `min_features`, layers that share their
    weight, adapters of LoRA and frozen 4-bit weights.

    Args:
        weight_gradient: Whether the product of the weights' gradients is int8 too, whose sums are over tokens; false
            computes it in the Trainer's precision.
        skip: Patterns of modules that stay as they are, such as `model.layers.0` or `*.*.*.down_proj`.
        min_features: Least number of input and of output features of a layer, in this rank's slice of it.

    Raises:
        DloError: `min_features` is less than 1.
    """

    phase = Phase.PRECISION

    def __init__(self, weight_gradient: bool = True, skip: list[str] | None = None, min_features: int = 64) -> None:
        if min_features < 1:
            raise DloError(f"LowPrecision: min_features must be at least 1, got {min_features}; 64 is usual")
        self.weight_gradient, self.skip, self.min_features = weight_gradient, tuple(skip or ()), min_features

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Gives the layers of a model's blocks int8 products, in place.

        Raises:
            DloError: A pattern of `skip` matches no layer, none is left, or the device has no int8 products.
        """
        from dlo_plugins.quantisation.int8_products import Int8Products

        if mesh.device_type == "cuda":
            _check_capability()
        names = self.choose_layers(module, plan)
        products = Int8Products(self.weight_gradient)
        for name in names:
            products.install(module.get_submodule(name))

    def choose_layers(self, module: nn.Module, plan: ParallelPlan) -> list[str]:
        """Returns the names of the layers to change.

        Raises:
            DloError: A pattern of `skip` matches no layer, or none is left.
        """
        from torch import nn
        from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

        uses = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
        blocks = tuple(f"{block}." for block in plan.block_names(module))
        linear = [
            name
            for name, part in module.named_modules()
            if isinstance(part, nn.Linear)
            and not isinstance(part, NonDynamicallyQuantizableLinear)
            and name.startswith(blocks)
            and uses[id(part.weight)] == 1
            and ".lora_" not in name
        ]
        for pattern in self.skip:
            if not any(_covered(name, (pattern,)) for name in linear):
                parents = {name.rsplit(".", cut)[0] for name in linear for cut in range(name.count(".") + 1)}
                raise DloError(
                    f"LowPrecision: skip must match linear layers in blocks, got '{pattern}', which matches none"
                    f"{did_you_mean(pattern, sorted(parents)) or '; remove it'}"
                )
        chosen = [
            name
            for name in linear
            if not _covered(name, self.skip) and min(module.get_submodule(name).weight.shape) >= self.min_features  # type: ignore[arg-type]
        ]
        if not chosen:
            raise DloError(
                f"LowPrecision: {type(module).__name__} must have linear layers of at least {self.min_features}"
                " features in its blocks, outside skip, got none; lower min_features, or leave the applier out"
            )
        return chosen


def _covered(name: str, patterns: tuple[str, ...]) -> bool:
    from dlo_framework.plan import ParallelPlan

    return bool(patterns) and bool(ParallelPlan(head=patterns).owners(name))


def _check_capability() -> None:
    import torch

    if torch.version.hip is None and torch.cuda.get_device_capability() < _CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        raise DloError(
            f"LowPrecision: the device must have compute capability {'.'.join(map(str, _CAPABILITY))} or more for int8"
            f" products, got {found}; leave the applier out"
        )
