"""Features of a projection that all ranks or heads need: of multi-query and of multi-head latent attention.

Fast Transformer Decoding: One Write-Head is All You Need. Shazeer, 2019, arXiv 1911.02150: a fused projection of many
query heads and one key/value head is divided like any other, the key and value by their features. Each rank computes
its share of them for all tokens and gathers the others' (:func:`install_gather`). So the weight has no replicated part:
checkpoints, gradient norms and optimizers treat it like other slices. In backward, the gradients of the key and value,
which come from each rank's query heads, are summed and scattered.

DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model. DeepSeek-AI, 2024, arXiv 2405.04434:
one projection gives a latent, from which each head's keys and values are projected, and a key with a rotary position
that all heads have in common (:func:`install_sharing`). Each rank computes both in full. The latent enters the region
at the column projection of keys and values, whose input gradient is summed over the ranks. The common key goes to each
rank's heads directly, so backward sums the gradients of these features alone, where the projection gives them. So the
gradients of the projection and of the latent's norm are complete on each rank. With sequence parallelism the region's
entry sums all of them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.tensor.collectives import copy_last_in, gather_features

if TYPE_CHECKING:
    from dlo_plugins.tensor.regions import Region


def install_sharing(projection: nn.Module, features: int, region: Region) -> None:
    """Makes backward sum the gradients of a projection's last features over the ranks.

    Args:
        projection: Projection that each rank computes in full.
        features: Number of its last output features that all heads use.
        region: Region of the projection.
    """
    if region.sequence is None:
        projection.register_forward_hook(functools.partial(_share, features, region))


def _share(features: int, region: Region, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return copy_last_in(output, features, region.communicator)


def gather_last(output: Tensor, features: int, parts: int, communicator: Communicator) -> Tensor:
    """Returns a projection's output with the features of all ranks in its last parts.

    Args:
        output: This rank's features, `[..., d + features / ranks]`.
        features: Number of features of the last parts, over all ranks.
        parts: Number of parts, such as a key and a value, each of which the ranks divide.
        communicator: Communicator of the ranks.

    Returns:
        `[..., d + features]`.
    """
    local = features // communicator.size
    own, shared = output.split((output.shape[-1] - local, local), dim=-1)
    gathered = gather_features(shared.unflatten(-1, (parts, -1)), communicator)
    return torch.cat((own, gathered.flatten(-2)), dim=-1)


def install_gather(column: nn.Module, features: int, region: Region) -> None:
    """Makes a column projection give the key and value in full.

    Args:
        column: Projection with queries, key and value.
        features: Number of features of key and value, over all ranks.
        region: Region of the projection.
    """
    column.register_forward_hook(functools.partial(_gather, features, region))


def _gather(features: int, region: Region, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return gather_last(output, features, 2, region.communicator)
