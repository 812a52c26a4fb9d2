"""LAMB whose moments have 8 or 4 bits: torchao's block-wise state under :mod:`~dlo_plugins.optimizers.lamb`.

bitsandbytes (0.50) has a class ``LAMB8bit``, whose block-wise step leaves the trust ratio out: it is Adam's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dlo_framework.errors import DloError
from dlo_plugins.optimizers.lamb import BoundedLamb
from dlo_plugins.optimizers.quantised_adam import QuantisedState, make_buffer


class Lamb8bit(QuantisedState, BoundedLamb):
    """LAMB with moments of 8 bits.

    Args:
        params: Parameters, or parameter groups.
        block_size: Number of consecutive elements with one scale; None for 256, or 128 with 4 bits.
        trust_bounds: Smallest and largest trust ratio; None for no bounds.
        **options: Other arguments of :class:`~dlo_plugins.optimizers.lamb.BoundedLamb`.

    Raises:
        DloError: A value is out of range.
    """

    bits = 8

    def __init__(
        self,
        params: Any,
        *,
        block_size: int | None = None,
        trust_bounds: tuple[float, float] | None = None,
        **options: Any,
    ) -> None:
        self.block_size = block_size or (128 if self.bits == 4 else 256)
        if self.block_size < 2 or self.block_size % 2:
            raise DloError(f"block_size of {type(self).__name__} must be even and positive, got {block_size}; use 256")
        super().__init__(params, trust_bounds=trust_bounds, **options)

    def new_moment(self, parameter: Tensor, *, signed: bool) -> Tensor:
        """Returns a moment of a parameter, zeros, quantised if it is large enough."""
        return make_buffer(parameter, self.bits, signed=signed, block_size=self.block_size)


class Lamb4bit(Lamb8bit):
    """LAMB with moments of 4 bits."""

    bits = 4
