"""Installs a tensor-parallel plan in a model: this rank's shards, and the communication of regions and vocabularies."""

from __future__ import annotations

from torch import nn

from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.tensor import (
    expert_slices,
    head_operands,
    local_shapes,
    parameter_sharding,
    regions,
    sharded_norms,
    shared_features,
    vocabulary,
)
from dlo_plugins.tensor.async_products import AsyncProducts
from dlo_plugins.tensor.local_random import LocalRandom
from dlo_plugins.tensor.sequence_parallel import ShardedSequence
from dlo_plugins.tensor.tp_plan import TPPlan, distinct, vocabulary_size


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
    parameter_sharding.shard_parameters(module, found, communicator)
    random = LocalRandom(communicator.rank) if random is None else random
    for name in distinct(module, found.regions):
        region = found.regions[name]
        around = module.get_submodule(name)
        columns = [module.get_submodule(column) for column in region.columns]
        rows = [module.get_submodule(row) for row in region.rows]
        made = regions.Region(name, around, communicator, random, stream, products)
        regions.install_region(around, columns, rows, made)
        if region.operands:
            head_operands.install_operands(around, region.operands, region.heads, made)
        for column, features in region.gathered.items():
            shared_features.install_gather(module.get_submodule(column), features, made)
        for projection, features in region.shared_features.items():
            shared_features.install_sharing(module.get_submodule(projection), features, made)
        if region.local_shapes:
            sizes = local_shapes.LocalSizes(communicator.size, region.heads, region.kv or region.heads, region.width)
            local_shapes.install_local_shapes(around, sizes, made)
        for norm in region.norms:
            size = found.divisions[f"{norm}.weight"].pieces[0]
            sharded_norms.install_norm(module.get_submodule(norm), size, communicator)
    for name in distinct(module, found.experts):
        expert_slices.install_slices(module.get_submodule(name), communicator)
    for name in distinct(module, found.vocabulary):
        vocabulary.install_vocabulary(module.get_submodule(name), vocabulary_size(found, name), communicator)
