"""Cutting a model's parameters, and noting in its layout what has been cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlo_framework.cuts import layout_of
from dlo_plugins.tensor.findings import Survey
from dlo_plugins.tensor.heads import tell, tell_config
from dlo_plugins.tensor.projections import kind_of


@torch.no_grad()
def cut(module: nn.Module, found: Survey, ranks: int, rank: int) -> None:
    """Puts this rank's parts in place of a model's parameters; tied ones stay one parameter.

    Args:
        module: the model; on any device, or on the meta device.
        found: what is to be cut.
        ranks: of the axis.
        rank: this one's number among them.
    """
    layout = layout_of(module)
    parts: dict[int, nn.Parameter] = {}
    wholes = dict(module.named_parameters(remove_duplicate=False))
    for name, division in found.divisions.items():
        whole, made = wholes[name], division.cut(ranks, rank)
        layout.cuts[name] = made
        if id(whole) not in parts:
            parts[id(whole)] = nn.Parameter(made.take(whole), requires_grad=whole.requires_grad)
            parts[id(whole)].__dict__.update(whole.__dict__)
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, parts[id(whole)])
    layout.partial |= found.partial
    for around, region in found.regions.items():
        for name in (*region.columns, *region.rows):
            _tell_projection(name, module.get_submodule(name))
        if region.heads:
            attention = module.get_submodule(around)
            tell(attention, region.heads, region.kv, region.width, ranks)
            if region.counts_by_config:
                tell_config(attention, ranks)


def _tell_projection(name: str, projection: nn.Module) -> None:
    """Sets the numbers of features that a projection says it has to those of its weight."""
    kind, weight = kind_of(name, projection), projection.weight
    assert isinstance(weight, Tensor)
    setattr(projection, kind.outputs, weight.shape[kind.out_dim])
    setattr(projection, kind.inputs, weight.shape[kind.in_dim])
