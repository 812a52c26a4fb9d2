"""Modules over features or tokens that ranks divide: RMS norms, projections with common features, vocabularies.

- RMS norms over sharded features, such as OLMo 2's of queries and of keys over all heads: Root Mean Square Layer
  Normalization. Zhang and Sennrich, 2019, arXiv 1910.07467. Departure: the mean square is summed over the ranks, one
  number for each token.
- Multi-query attention: Fast Transformer Decoding: One Write-Head is All You Need. Shazeer, 2019, arXiv 1911.02150. A
  fused projection of many query heads and one key/value head is divided like any other, the key and value by their
  features. Each rank computes its share of them for all tokens and gathers the others' (:func:`install_gather`). So the
  weight has no replicated part: checkpoints, gradient norms and optimizers treat it like other slices. In backward, the
  gradients of the key and value, which come from each rank's query heads, are summed and scattered.
- Latent attention: DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model. DeepSeek-AI,
  2024, arXiv 2405.04434. One projection gives a latent, from which each head's keys and values are projected, and a key
  with a rotary position that all heads have in common (:func:`install_sharing`). Each rank computes both in full. The
  latent enters the region at the column projection of keys and values, whose input gradient is summed over the ranks.
  The common key goes to each rank's heads directly, so backward sums the gradients of these features alone, where the
  projection gives them. So the gradients of the projection and of the latent's norm are complete on each rank. With
  sequence parallelism the region's entry sums all of them.
- Embeddings and output projections over a sharded vocabulary: Megatron-LM. Shoeybi et al., 2019, arXiv 1909.08053,
  section 3. Departure: a vocabulary that is not divisible by the ranks is not padded; the first ranks have one token
  more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.vocab_parallel import VocabularyShard, set_shard, shard_of
from dlo_plugins.parallel.tensor.collectives import all_reduce_both, copy_last_in, gather_features, reduce_from_region
from dlo_plugins.parallel.tensor.projections import REGION, base_of, mix_in, set_features
from dlo_plugins.parallel.tensor.tp_plan import local_range

if TYPE_CHECKING:
    from dlo_plugins.parallel.tensor.regions import Region

_FEATURES = "tensor_features"


class ShardedRMSNorm:
    """Mixin for the class of an RMS norm: normalises over the features of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's features `[..., d]`, normalised over the features of all ranks."""
        module: Any = self
        communicator, size = module.__dict__[REGION].communicator, module.__dict__[_FEATURES]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = all_reduce_both(wide.square().sum(dim=-1, keepdim=True), communicator) / size
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or torch.finfo(x.dtype).eps
        return (module.weight * (wide * torch.rsqrt(mean_square + eps))).to(x.dtype)


def install_norm(module: nn.Module, size: int, region: Region) -> None:
    """Makes a norm with a sharded weight normalise over the features of all ranks.

    Args:
        module: Norm; its class is replaced by a derived one.
        size: Number of features over all ranks.
        region: Region of the norm.
    """
    module.__dict__[_FEATURES] = size
    mix_in(ShardedRMSNorm, module, region)


def install_sharing(projection: nn.Module, features: int, region: Region) -> None:
    """Makes backward sum the gradients of a projection's last features over the ranks.

    Args:
        projection: Projection that each rank computes in full.
        features: Number of its last output features that all heads use.
        region: Region of the projection.
    """
    if region.sequence is None:
        projection.register_forward_hook(lambda _, args, output: copy_last_in(output, features, region.communicator))


def install_gather(column: nn.Module, features: int, region: Region) -> None:
    """Makes a column projection give the key and value in full.

    Args:
        column: Projection with queries, key and value.
        features: Number of features of key and value, over all ranks.
        region: Region of the projection.
    """

    def gather(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        local = features // region.communicator.size
        own, shared = output.split((output.shape[-1] - local, local), dim=-1)
        gathered = gather_features(shared.unflatten(-1, (2, -1)), region.communicator)  # Key and value, each divided.
        return torch.cat((own, gathered.flatten(-2)), dim=-1)

    column.register_forward_hook(gather)


# --- vocabularies --------------------------------------------------------------------------------------------


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
    shard = VocabularyShard(communicator, first, count, size)
    set_shard(module, shard)
    if isinstance(module, nn.Embedding):
        module.num_embeddings = count
        if module.padding_idx is not None:
            padding = module.padding_idx - first
            module.padding_idx = padding if 0 <= padding < count else None
    else:
        base_of(module).out_features = count
        if base_of(module) is not module:
            set_features(module)
    mix_in(ShardedEmbedding if isinstance(module, nn.Embedding) else ShardedHead, module, shard)
