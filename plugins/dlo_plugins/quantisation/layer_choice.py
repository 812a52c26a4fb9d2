"""Choice of the layers that are quantised, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dlo_framework.errors import DloError, did_you_mean, shown_names
from dlo_framework.plan import ParallelPlan
from dlo_plugins.quantisation.schemes import GROUP_SIZES, INT4_ROWS, Scheme


def choose_layers(
    model: nn.Module,
    scheme: Scheme,
    group_size: int,
    skip: Sequence[str] = (),
    head: Sequence[str] = (),
    slices: int = 1,
) -> list[str]:
    """Returns the names of the linear layers to quantise.

    Left out are the head, whose errors go into the logits unreduced, layers that share their weight with another
    module, adapters of LoRA, and projections that are never called, as in ``nn.MultiheadAttention``.

    Args:
        model: Full model, which may be on the meta device.
        scheme: Scheme of quantisation.
        group_size: Number of input features of a group.
        skip: Patterns of modules to leave out.
        head: Patterns of the modules after the last block.
        slices: Number of slices of tensor parallelism that a row may be cut into.

    Raises:
        DloError: If a pattern matches no layer, none is left, or a layer has a shape that the scheme cannot have.
    """
    found = [name for name in linear_layers(model) if not _covered(name, head)]
    chosen = leave_out(found, skip, "Quantise: skip must match linear layers that would be quantised")
    if not chosen:
        raise DloError(
            f"Quantise: {type(model).__name__} must have linear layers outside its head and skip, got none; shorten"
            " skip, or leave the callback out"
        )
    if scheme.is_grouped:
        _check_shapes(model, chosen, group_size, slices)
    return chosen


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linear layers that are called and have their weight alone, without LoRA's adapters, by name."""
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, NonDynamicallyQuantizableLinear)
        and uses[id(module.weight)] == 1
        and ".lora_" not in f".{name}"
    }


def leave_out(names: Sequence[str], skip: Sequence[str], rule: str) -> list[str]:
    """Returns the names of the layers that no pattern matches.

    Args:
        names: Names of layers.
        skip: Patterns of modules to leave out.
        rule: Rule of the patterns, for the message.

    Raises:
        DloError: If a pattern matches no layer.
    """
    for pattern in skip:
        if not any(_covered(name, [pattern]) for name in names):
            known = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
            near = did_you_mean(pattern, sorted(known))
            raise DloError(f"{rule}, got '{pattern}', which matches none{near or '; remove it'}")
    return [name for name in names if not _covered(name, skip)]


def _covered(name: str, patterns: Sequence[str]) -> bool:
    return bool(patterns) and bool(ParallelPlan(head=tuple(patterns)).owners(name))


def _patterns(some: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns patterns that match some of the names and no other: with `*` for numbers where that is so."""
    found: dict[str, None] = {}
    for name in some:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        found[pattern if {each for each in names if _covered(each, [pattern])} <= set(some) else name] = None
    return list(found)


def _check_shapes(model: nn.Module, names: list[str], group_size: int, slices: int) -> None:
    found = linear_layers(model)
    shapes = {name: found[name].weight.shape for name in names}
    uneven = [name for name, (_, inputs) in shapes.items() if inputs % group_size]
    if uneven:
        fits = [size for size in GROUP_SIZES if not any(inputs % size for _, inputs in shapes.values())]
        fix = f"set group_size: {max(fits)}" if fits else f"add to skip: {', '.join(_patterns(uneven, names))}"
        raise DloError(
            f"Quantise: group_size must divide the input features of each layer, got {group_size} for"
            f" {shapes[uneven[0]][1]} of {shown_names(uneven)}; {fix}"
        )
    odd = [name for name, (outputs, _) in shapes.items() if outputs % INT4_ROWS]
    if odd:
        raise DloError(
            f"Quantise: the output features of each layer must be a multiple of {INT4_ROWS} for int4_weights, got"
            f" {shapes[odd[0]][0]} of {shown_names(odd)}; add to skip:"
            f" {', '.join(_patterns(odd, names))}"
        )
    cut = [name for name, (_, inputs) in shapes.items() if inputs % slices or inputs // slices % group_size]
    if slices > 1 and cut:
        sizes = [n for n in range(slices - 1, 0, -1) if all(k % (n * group_size) == 0 for _, k in shapes.values())]
        raise DloError(
            f"Quantise: group_size must divide the slices of tensor parallelism, got {group_size} for"
            f" {shapes[cut[0]][1]} / {slices} input features of {shown_names(cut)}; set tp={sizes[0]}"
        )
