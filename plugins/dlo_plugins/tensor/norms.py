"""RMS norms over features of which each rank has a part: OLMo 2's, of queries and of keys over all heads.

Root Mean Square Layer Normalization. Zhang and Sennrich, 2019, arXiv 1910.07467. Departure: the mean square is summed
over the ranks, one number a token.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.tensor.collectives import sum_both

_COMMUNICATOR = "tensor_communicator"


class SharedNorm:
    """What an RMS norm's class is mixed with."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns this rank's `[..., d]`, normalised over the features of all ranks, of its `[..., d]`."""
        module: Any = self
        found: tuple[Any, int] = module.__dict__[_COMMUNICATOR]
        communicator, size = found
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = sum_both(wide.square().sum(dim=-1, keepdim=True), communicator) / size
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or torch.finfo(x.dtype).eps
        return (module.weight * (wide * torch.rsqrt(mean_square + eps))).to(x.dtype)


class _Shared(tuple[Any, int]):
    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self  # A process group cannot be copied.


def install(module: nn.Module, size: int, communicator: Communicator) -> None:
    """Makes a norm, whose weight has been cut, normalise over the features of all ranks.

    Args:
        module: changes its class for one derived from it.
        size: features of all ranks.
        communicator: the ranks that share them.
    """
    module.__dict__[_COMMUNICATOR] = _Shared((communicator, size))
    module.__class__ = _shared_class(type(module))  # type: ignore[arg-type]


@functools.cache
def _shared_class(cls: Any) -> type[nn.Module]:
    return type(f"Shared{cls.__name__}", (SharedNorm, cls), {})
