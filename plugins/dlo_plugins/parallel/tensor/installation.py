"""Installs a tensor-parallel plan in a model: this rank's shards, and the communication of regions and vocabularies."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.models.attention.attention_mask import LocalHeads, bind_heads
from dlo_framework.shards import get_layout
from dlo_plugins.parallel.tensor import expert_slices, local_shapes, regions, sharded_modules
from dlo_plugins.parallel.tensor.full_values import give_hooks_full
from dlo_plugins.parallel.tensor.heads import install_operands, set_local_config, set_local_heads
from dlo_plugins.parallel.tensor.local_random import LocalRandom
from dlo_plugins.parallel.tensor.overlap import AsyncProducts
from dlo_plugins.parallel.tensor.projections import base_of, set_channel_counts, set_feature_counts, set_features
from dlo_plugins.parallel.tensor.sequence_parallel import ShardedSequence
from dlo_plugins.parallel.tensor.tp_plan import TPPlan, distinct


def install_plan(
    module: nn.Module,
    found: TPPlan,
    communicator: Communicator,
    stream: ShardedSequence | None = None,
    products: AsyncProducts | None = None,
    random: LocalRandom | None = None,
) -> None:
    """Cuts a model in place.

    Args:
        module: Full model, the same on each rank.
        found: Tensor-parallel plan of the model for this number of ranks.
        communicator: Communicator of the ranks.
        stream: Sequence that is split between regions; None without sequence parallelism.
        products: Products that overlap with collectives; None without asynchronous tensor parallelism.
        random: This rank's random numbers; by default new ones.
    """
    shard_parameters(module, found, communicator)
    random = LocalRandom(communicator.rank) if random is None else random
    for name in distinct(module, found.regions):
        region = found.regions[name]
        around = module.get_submodule(name)
        columns = [module.get_submodule(column) for column in region.columns]
        rows = [module.get_submodule(row) for row in region.rows]
        made = regions.Region(name, around, communicator, random, stream, products)
        regions.install_region(around, columns, rows, made)
        if region.operands:
            install_operands(around, region.operands, region.heads, made)
        for column, features in region.gathered.items():
            sharded_modules.install_gather(module.get_submodule(column), features, made)
        for projection, features in region.shared_features.items():
            sharded_modules.install_sharing(module.get_submodule(projection), features, made)
        if region.local_shapes:
            sizes = local_shapes.LocalSizes(communicator.size, region.heads, region.kv or region.heads, region.width)
            local_shapes.install_local_shapes(around, sizes, made)
        for norm in region.norms:
            size = found.divisions[f"{norm}.weight"].pieces[0]
            sharded_modules.install_norm(module.get_submodule(norm), size, made)
    for name in distinct(module, found.experts):
        expert_slices.install_slices(module.get_submodule(name), communicator)
    for name in distinct(module, found.vocabulary):
        sharded_modules.install_vocabulary(module.get_submodule(name), found.vocabulary[name], communicator)


@torch.no_grad()
def shard_parameters(module: nn.Module, found: TPPlan, communicator: Communicator) -> None:
    """Replaces a model's parameters by this rank's shards; tied ones stay one parameter.

    Args:
        module: Model, on any device; the meta device will do.
        found: Tensor-parallel plan.
        communicator: Communicator of the axis.
    """
    ranks, rank = communicator.size, communicator.rank
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
            give_hooks_full(name, full, shards[id(full)], made, communicator)
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, shards[id(full)])
    for partial, name in {parameters[name]: name for name in sorted(found.partial - found.divisions.keys())}.items():
        give_hooks_full(name, partial, partial, None, communicator)
    layout.partial |= found.partial
    for around in distinct(module, found.regions):
        region = found.regions[around]
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
