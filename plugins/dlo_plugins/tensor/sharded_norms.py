"""RMS norms over sharded features, such as OLMo 2's norms of queries and of keys over all heads.

Root Mean Square Layer Normalization. Zhang and Sennrich, 2019, arXiv 1910.07467. Departure: the mean square is summed
over the ranks, one number for each token.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.tensor.collectives import all_reduce_both

_COMMUNICATOR = "tensor_communicator"


class ShardedRMSNorm:
    """Mixin for the class of an RMS norm: normalises over the features of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's features `[..., d]`, normalised over the features of all ranks."""
        module: Any = self
        found: tuple[Any, int] = module.__dict__[_COMMUNICATOR]
        communicator, size = found
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = all_reduce_both(wide.square().sum(dim=-1, keepdim=True), communicator) / size
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or torch.finfo(x.dtype).eps
        return (module.weight * (wide * torch.rsqrt(mean_square + eps))).to(x.dtype)


class _Shared(tuple[Any, int]):
    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self  # A process group cannot be copied.


def install_norm(module: nn.Module, size: int, communicator: Communicator) -> None:
    """Makes a norm with a sharded weight normalise over the features of all ranks.

    Args:
        module: Norm; its class is replaced by a derived one.
        size: Number of features over all ranks.
        communicator: Communicator of the ranks that share the features.
    """
    module.__dict__[_COMMUNICATOR] = _Shared((communicator, size))
    module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]


@functools.cache
def _sharded_class(cls: Any) -> type[nn.Module]:
    return type(f"Sharded{cls.__name__}", (ShardedRMSNorm, cls), {})
