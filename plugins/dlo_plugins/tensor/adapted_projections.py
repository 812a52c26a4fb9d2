"""Low-rank adapters of sharded projections, and the magnitudes of DoRA: what is sharded, and how they compute.

LoRA: Low-Rank Adaptation of Large Language Models. Hu et al., 2021, arXiv 2106.09685.
DoRA: Weight-Decomposed Low-Rank Adaptation. Liu et al., 2024, arXiv 2402.09353.

An adapter adds `s B A x` to a projection `W x`, with A `[rank, in]` and B `[out, rank]`. Of a column projection, B is
sharded with the rows of W, and A is replicated: its gradient is a partial sum. Of a row projection, A is sharded with
the columns of W, and B is replicated: the rank's `W x + s B A x` is a partial sum, which one all-reduce completes.
DoRA's magnitudes belong to the rows of W. The norm of a row of a row projection is over all ranks.

The modules are peft's (0.15 to 0.21): a wrapper with `base_layer`, `lora_A` and `lora_B`. Its forward is not replaced.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_plugins.tensor.division import Division
from dlo_plugins.tensor.projections import RowProduct

#: Attribute of sharded modules with their region, which has a communicator.
REGION = "tensor_region"


def base_of(module: nn.Module) -> Any:
    """Returns the projection inside a wrapper with adapters; any other module itself."""
    return getattr(module, "base_layer", module)


def base_name(name: str, module: nn.Module) -> str:
    """Returns the name of :func:`base_of`, for a module of this name."""
    return f"{name}.base_layer" if hasattr(module, "base_layer") else name


def check_adapted(name: str, module: nn.Module) -> None:
    """Checks that the adapters of a wrapper are those that this module can shard.

    Raises:
        DloError: They are of another kind than LoRA and DoRA.
    """
    if not hasattr(module, "base_layer"):
        return
    kinds = {key.split(".")[0] for key, _ in module.named_parameters()} - {"base_layer"}
    if not {"lora_A", "lora_B"} <= kinds or kinds - {"lora_A", "lora_B", "lora_magnitude_vector"}:
        raise DloError(
            f"adapters of '{name}' must be LoRA or DoRA for tensor parallelism, got {type(module).__name__} with"
            f" {', '.join(sorted(kinds))}; set tp=1"
        )


def divide_adapters(
    name: str, module: nn.Module, pieces: tuple[int, ...], *, row: bool
) -> tuple[dict[str, Division], set[str]]:
    """Returns the divisions of a wrapper's adapters, and the names of those that are replicated.

    The gradients of the replicated ones are partial sums.

    Args:
        name: Name of the wrapper.
        module: Wrapper; a projection without adapters has none.
        pieces: Slices of the features that the ranks share: outputs of a column projection, inputs of a row projection.
        row: Whether it is a row projection.
    """
    divisions: dict[str, Division] = {}
    partial: set[str] = set()
    if not hasattr(module, "base_layer"):
        return divisions, partial
    for key, _ in module.named_parameters():
        kind = key.split(".")[0]
        if kind == "base_layer":
            continue
        if kind == "lora_A":
            sharded, dim = row, 1
        else:
            sharded, dim = not row, 0
        if sharded:
            divisions[f"{name}.{key}"] = Division(dim, pieces)
        else:
            partial.add(f"{name}.{key}")
    return divisions, partial


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
        found: Tensor = super().forward(x, **options)  # type: ignore[misc]
        return found


def install_row_adapters(module: Any, region: Any) -> None:
    """Makes a row wrapper compute this rank's partial sum.

    Args:
        module: Wrapper; classes inside it are replaced by derived ones.
        region: Region of the wrapper.
    """
    base = module.base_layer
    base.__dict__[REGION] = region
    base.__class__ = _derived(InnerRowProjection, type(base))  # type: ignore[arg-type]
    for layer in getattr(module, "lora_magnitude_vector", {}).values():
        layer.__dict__[REGION] = region
        layer.__class__ = _derived(ShardedRowNorms, type(layer))  # type: ignore[arg-type]


@functools.cache
def _derived(mixin: Any, cls: Any) -> type[nn.Module]:
    return type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), {})
