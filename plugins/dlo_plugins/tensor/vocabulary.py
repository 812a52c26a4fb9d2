"""Embeddings and output projections that are sharded over the vocabulary.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053, section 3. Departure: a vocabulary that is not divisible by the ranks is not padded; the first ranks
have one token more.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.vocab_parallel import VocabularyShard, set_shard, shard_of
from dlo_plugins.tensor.adapted_projections import base_of, set_features
from dlo_plugins.tensor.collectives import reduce_from_region
from dlo_plugins.tensor.division import local_range


class ShardedEmbedding:
    """Mixin for the class of an embedding: each rank looks up its own tokens, and the ranks sum the results."""

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of all tokens, `[..., D]`, of ids `[...]`."""
        shard = shard_of(self)  # type: ignore[arg-type]
        assert shard is not None
        columns, own = shard.locate_targets(ids)
        found: Tensor = super().forward(columns)  # type: ignore[misc]
        return reduce_from_region(found.masked_fill(~own[..., None], 0), shard.communicator)


class ShardedHead:
    """Mixin for the class of an output projection; see :class:`VocabularyShard`."""

    def forward(self, hidden: Tensor, split: bool = False) -> Tensor:
        """Returns the logits of the full vocabulary, or only this rank's."""
        if split:
            return super().forward(hidden)  # type: ignore[misc]
        shard = shard_of(self)  # type: ignore[arg-type]
        assert shard is not None
        return shard.gather(super().forward(shard.enter(hidden)))  # type: ignore[misc]


def install_vocabulary(module: nn.Module, size: int, communicator: Communicator) -> None:
    """Makes an embedding or an output projection with a sharded weight work on its shard of the vocabulary.

    Args:
        module: Embedding or output projection; its class is replaced by a derived one.
        size: Size of the full vocabulary.
        communicator: Communicator of the ranks that share it.
    """
    first, count = local_range(size, communicator.size, communicator.rank)
    set_shard(module, VocabularyShard(communicator, first, count, size))
    if isinstance(module, nn.Embedding):
        module.num_embeddings = count
        if module.padding_idx is not None:
            padding = module.padding_idx - first
            module.padding_idx = padding if 0 <= padding < count else None
    else:
        base_of(module).out_features = count
        if base_of(module) is not module:
            set_features(module)
    module.__class__ = _split_class(type(module))  # type: ignore[arg-type]


@functools.cache
def _split_class(cls: Any) -> type[nn.Module]:
    mixin: Any = ShardedEmbedding if issubclass(cls, nn.Embedding) else ShardedHead
    return type(f"Split{cls.__name__}", (mixin, cls), {})
