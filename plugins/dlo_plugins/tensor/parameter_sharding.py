"""Sharding of a model's parameters for tensor parallelism, recorded in the model's layout."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from dlo_framework.attention.attention_mask import LocalHeads, bind_heads
from dlo_framework.tensor_slice import get_layout
from dlo_plugins.tensor.adapted_projections import base_of, set_features
from dlo_plugins.tensor.channelwise import set_channel_counts
from dlo_plugins.tensor.heads import set_local_config, set_local_heads
from dlo_plugins.tensor.projections import set_feature_counts
from dlo_plugins.tensor.tp_plan import TPPlan


@torch.no_grad()
def shard_parameters(module: nn.Module, found: TPPlan, ranks: int, rank: int) -> None:
    """Replaces a model's parameters by this rank's shards; tied ones stay one parameter.

    Args:
        module: Model, on any device; the meta device will do.
        found: Tensor-parallel plan.
        ranks: Number of ranks on the axis.
        rank: This rank's number on the axis.
    """
    layout = get_layout(module)
    shards: dict[int, nn.Parameter] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, division in found.divisions.items():
        if name not in parameters:
            owner, _, key = name.rpartition(".")
            part, made = module.get_submodule(owner), division.slice_for(ranks, rank)
            part._buffers[key] = made.slice_tensor(cast("Tensor", part._buffers[key]))
            if key not in part._non_persistent_buffers_set:
                layout.slices[name] = made
            continue
        full, made = parameters[name], division.slice_for(ranks, rank)
        layout.slices[name] = made
        if id(full) not in shards:
            shards[id(full)] = nn.Parameter(made.slice_tensor(full), requires_grad=full.requires_grad)
            shards[id(full)].__dict__.update(full.__dict__)
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, shards[id(full)])
    layout.partial |= found.partial
    for around, region in found.regions.items():
        for name in (*region.columns, *region.rows):
            projection = module.get_submodule(name)
            set_feature_counts(name, base_of(projection))
            if projection is not base_of(projection):
                set_features(projection)
        for name in region.channelwise:
            set_channel_counts(module.get_submodule(name), ranks)
        if region.heads:
            attention = module.get_submodule(around)
            if region.local_counts:
                set_local_heads(attention, region.heads, region.kv, region.width, ranks)
            count = region.heads // ranks
            bind_heads(attention, LocalHeads(rank * count, count))
            if region.counts_by_config:
                set_local_config(attention, ranks)
