"""Choice of the weights that are pruned: those of linear layers and convolutions, without skipped ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dlo_framework.errors import DloError, shown_names
from dlo_framework.plan import ParallelPlan, match_names
from dlo_framework.task import Task
from dlo_plugins.pruning.nm_pattern import NMPattern


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
    """Returns the dim of a layer's weight with its input features; None for a layer of another kind."""
    if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return 1
    return 0 if is_transposed(part) else None


def is_transposed(part: nn.Module) -> bool:
    """Returns whether a module is transformers' Conv1D (GPT-2): a linear layer whose weight is [in, out]."""
    return hasattr(part, "nf") and hasattr(part, "nx")


def last_linear(module: nn.Module) -> str | None:
    """Returns the name of the output layer: the last linear one, in the plan's head if it has any."""
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    head: list[str] = []
    if isinstance(module, Task):
        try:
            plan = module.parallel_plan()
        except DloError:  # The plan has no blocks, and so no head.
            plan = ParallelPlan()
        head = [name for name in linear if "head" in plan.owners(name.removeprefix("model."))]
    return next(reversed(head or linear), None)


def match_or_last(patterns: Sequence[str] | None, names: Sequence[str], module: nn.Module, rule: str) -> set[str]:
    """Returns the names of parameters that patterns of them or of modules match.

    Args:
        patterns: Patterns; None for the output layer.
        names: Names of the parameters.
        module: Module that they are in.
        rule: Rule of the patterns, for the message.

    Raises:
        DloError: A pattern matches none.
    """
    if patterns is None:
        last = last_linear(module)
        return {name for name in names if last is not None and name.startswith(f"{last}.")}
    return set(match_names(patterns, names, [*names, *(name for name, _ in module.named_modules() if name)], rule))


def select_layers(module: nn.Module, skip: Sequence[str] | None) -> list[PrunableLayer]:
    """Returns the layers to prune.

    Args:
        module: Module with its model built; it may be on the meta device.
        skip: Patterns of layers or weights that stay dense; None for the output layer.

    Raises:
        DloError: If a pattern matches no layer that could be pruned, or no layer is left.
    """
    layers = prunable_layers(module)
    names = [layer.name for layer in layers]
    skipped = match_or_last(skip, names, module, "Prune: each pattern of skip must match a layer's weight")
    frozen = {name.replace("_orig_mod.", "") for name, p in module.named_parameters() if not p.requires_grad}
    left = [layer for layer in layers if layer.name not in skipped | frozen]
    if not left:
        raise DloError(
            f"Prune: the model must have linear layers or convolutions that train and are not skipped, got"
            f" {len(layers)} of which none is left; shorten skip, or remove Prune"
        )
    return left


def check_pattern(layers: Iterable[PrunableLayer], shapes: Mapping[str, Sequence[int]], pattern: NMPattern) -> None:
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
