"""Replaces MLPs of a model by mixtures whose experts start as copies of the MLP: sparse upcycling.

Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints. Komatsuzaki et al., 2022, arXiv 2212.05055; the
blocks are those of V-MoE, Scaling Vision with Sparse Mixture of Experts. Riquelme et al., 2021, arXiv 2106.05974.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.experts.layer import Experts, MixtureLayer
from dlo_framework.experts.mixture_options import MixtureOptions


@dataclass(frozen=True)
class DenseMLP:
    """Linear layers of an MLP, as its library holds them.

    Attributes:
        up: First projection; with `gate`, what the activated gate multiplies.
        down: Last projection.
        activation: Activation.
        gate: Projection of the gate; None without one.
        dropout: Dropout probabilities after the activation and after the output.
    """

    up: nn.Linear
    down: nn.Linear
    activation: Callable[[Tensor], Tensor]
    gate: nn.Linear | None = None
    dropout: tuple[float, float] = (0.0, 0.0)


def replaced_blocks(count: int, every: int) -> list[int]:
    """Returns the numbers of the blocks that get a mixture: the last of each `every`, as in V-MoE."""
    return list(range(every - 1, count, every))


def upcycle(
    model: nn.Module, mlps: Sequence[str], read: Callable[[nn.Module], DenseMLP | None], options: MixtureOptions
) -> None:
    """Replaces MLPs by mixtures, in place.

    With `normalize`, the model computes at first what it did before. With `shared`, the experts' outputs are 0 at
    first, and the MLP stays as the shared expert.

    Args:
        model: Model, also on the meta device.
        mlps: Names of the MLPs of all blocks, in order, of which each `every`-th is replaced.
        read: Function that returns the linear layers of an MLP; None for other modules.
        options: Options of the mixtures.

    Raises:
        DloError: If no block is replaced, or its MLP cannot be read.
    """
    chosen = [mlps[number] for number in replaced_blocks(len(mlps), options.every)]
    if not mlps:
        raise DloError(
            f"experts.count must have a model whose blocks have MLPs, got {type(model).__name__}; leave experts out"
        )
    if not chosen:
        raise DloError(f"experts.every must be at most {len(mlps)}, the number of MLPs, got {options.every}; set 2")
    for name in chosen:
        mlp = model.get_submodule(name)
        dense = read(mlp)
        if dense is None:
            raise DloError(
                f"experts.count must have blocks with an MLP of two linear layers, or three with a gate, got"
                f" {type(mlp).__name__} at '{name}'; use another model, or leave experts out"
            )
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, mixture_of(mlp, dense, options))


def mixture_of(mlp: nn.Module, dense: DenseMLP, options: MixtureOptions) -> MixtureLayer:
    """Returns the mixture whose experts are copies of an MLP."""
    assert options.count is not None
    with torch.device(dense.up.weight.device):
        experts = Experts(
            options.count,
            dense.up.in_features,
            dense.up.out_features,
            dense.activation,
            gated=dense.gate is not None,
            bias=dense.up.bias is not None,
            dropout=dense.dropout,
            starts_at_zero=options.shared,
        )
        layer = MixtureLayer(dense.up.in_features, experts, options, mlp if options.shared else None)
    layer.to(dense.up.weight.dtype)
    layer.train(mlp.training)
    if not dense.up.weight.is_meta:
        _copy(experts, dense, options)
    return layer


@torch.no_grad()
def _copy(experts: Experts, dense: DenseMLP, options: MixtureOptions) -> None:
    first = [dense.up] if dense.gate is None else [dense.gate, dense.up]
    values = {
        experts.first_name: torch.cat([layer.weight for layer in first]),
        "down_proj": dense.down.weight * (not options.shared),
    }
    if dense.up.bias is not None:
        values[f"{experts.first_name}_bias"] = torch.cat([layer.bias for layer in first])
        values["down_proj_bias"] = dense.down.bias * (not options.shared)
    for name, value in values.items():
        experts.get_parameter(name).copy_(value.expand_as(experts.get_parameter(name)))
