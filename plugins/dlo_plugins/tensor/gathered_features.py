"""Features of a column projection that all ranks need: the one key and value of multi-query attention.

Fast Transformer Decoding: One Write-Head is All You Need. Shazeer, 2019, arXiv 1911.02150.

A fused projection of many query heads and one key/value head is divided like any other, the key and value by their
features. Each rank computes its share of them for all tokens and gathers the others'. So the weight has no replicated
part: checkpoints, gradient norms and optimizers treat it like other slices. In backward, the gradients of the key and
value, which come from each rank's query heads, are summed and scattered.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.tensor.collectives import gather_features

if TYPE_CHECKING:
    from dlo_plugins.tensor.regions import Region


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
