"""Features of a projection that all heads use as they are, such as the rotary key of multi-head latent attention.

DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model. DeepSeek-AI, 2024, arXiv 2405.04434.

One projection gives a latent, from which each head's keys and values are projected, and a key with a rotary position
that all heads have in common. Each rank computes both in full. The latent enters the region at the column projection of
keys and values, whose input gradient is summed over the ranks. The common key goes to each rank's heads directly, so
backward sums the gradients of these features alone, where the projection gives them. So the gradients of the projection
and of the latent's norm are complete on each rank. With sequence parallelism the region's entry sums all of them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dlo_plugins.tensor.collectives import copy_last_in

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
