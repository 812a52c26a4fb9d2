"""Choice of the weights that are pruned: those of linear layers and convolutions, without skipped ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from dlo_framework.errors import DloError, shown_names
from dlo_framework.plan import match_names
from dlo_plugins.pruning.nm_pattern import NMPattern

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class PrunableLayer:
    """Layer whose weight can be pruned.

    Attributes:
        name: Name of the weight.
        input_dim: Dimension of the weight along which input features or channels lie.
    """

    name: str
    input_dim: int


def prunable_layers(module: nn.Module) -> list[PrunableLayer]:
    """Returns the linear layers and convolutions of a module whose weights are its own, sorted by name.

    Embeddings, norms, biases, and a head that shares its weight with an embedding are left dense. The order is the same
    under every strategy.
    """
    owned = {id(parameter): name for name, parameter in module.named_parameters()}  # The first name of shared ones.
    found = []
    for prefix, part in module.named_modules():
        weight = part._parameters.get("weight")
        if weight is None or owned.get(id(weight)) != (f"{prefix}.weight" if prefix else "weight"):
            continue
        dim = _input_dim(part)
        if dim is not None:
            found.append(PrunableLayer(owned[id(weight)].replace("_orig_mod.", ""), dim))
    return sorted(found, key=lambda layer: layer.name)


def _input_dim(part: nn.Module) -> int | None:
    if isinstance(part, nn.Linear | _CONVOLUTIONS[0] | _CONVOLUTIONS[1] | _CONVOLUTIONS[2]):
        return 1
    # transformers' Conv1D (GPT-2): a linear layer whose weight is [in, out], with the attributes nx and nf.
    return 0 if hasattr(part, "nf") and hasattr(part, "nx") else None


def select_layers(
    module: nn.Module, skip: Sequence[str] | None, last: str | None, trained: Iterable[str] | None = None
) -> list[PrunableLayer]:
    """Returns the layers to prune.

    Args:
        module: Module with its model built; it may be on the meta device.
        skip: Patterns of layers or weights that stay dense; None for the output layer.
        last: Name of the output layer; None if there is none.
        trained: Names of the parameters that an optimizer steps; None for those that require gradients.

    Raises:
        DloError: If a pattern matches no layer that could be pruned, or no layer is left.
    """
    layers = prunable_layers(module)
    names = [layer.name for layer in layers]
    if skip is None:
        skipped = {name for name in names if last is not None and name.startswith(f"{last}.")}
    else:
        known = [*names, *(name for name, _ in module.named_modules() if name)]
        skipped = set(match_names(skip, names, known, "Prune: each pattern of skip must match a layer's weight"))
    if trained is None:
        frozen = {name.replace("_orig_mod.", "") for name, p in module.named_parameters() if not p.requires_grad}
        left = [layer for layer in layers if layer.name not in skipped | frozen]
    else:
        own = set(trained)
        left = [layer for layer in layers if layer.name not in skipped and layer.name in own]
    if not left:
        raise DloError(
            f"Prune: the model must have linear layers or convolutions that train and are not skipped, got"
            f" {len(layers)} of which none is left; shorten skip, or remove Prune"
        )
    return left


def check_pattern(layers: Iterable[PrunableLayer], shapes: dict[str, Sequence[int]], pattern: NMPattern) -> None:
    """Checks that M divides the input dim of each layer.

    Args:
        layers: Layers to prune.
        shapes: Full shapes of the weights, by name.
        pattern: Pattern.

    Raises:
        DloError: If M does not divide it; the fix is the list to skip.
    """
    uneven = {
        layer.name: int(shapes[layer.name][layer.input_dim])
        for layer in layers
        if shapes[layer.name][layer.input_dim] % pattern.m
    }
    if uneven:
        sizes = ", ".join(f"{name.removesuffix('.weight')} with {size}" for name, size in list(uneven.items())[:3])
        raise DloError(
            f"Prune: the input size of each pruned layer must be divisible by {pattern.m} for pattern '{pattern}', got"
            f" {sizes}{', ...' if len(uneven) > 3 else ''}; add to skip:"
            f" {shown_names([name.removesuffix('.weight') for name in uneven])}"
        )
