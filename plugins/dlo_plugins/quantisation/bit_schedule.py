"""Schedule of the bits of a weight in training: one bit less at a time, each time after twice as many steps.

DeepSpeed's Mixture of Quantization (MoQ), 2021, https://www.deepspeed.ai/tutorials/MoQ-tutorial/: with a period of p
steps, a bit is dropped after p, 2p, 4p, ... steps of quantised training. DeepSpeed 0.19 has no MoQ any more. Longer
periods of layers with large curvature are in :mod:`dlo_plugins.quantisation.layer_curvature`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BitSchedule:
    """Schedule of bits.

    Attributes:
        start_bits: Bits at the start of quantised training.
        target_bits: Bits at the end.
        period: Number of optimizer steps before the first bit is dropped.
    """

    start_bits: int
    target_bits: int
    period: int

    def bits(self, steps: int) -> int:
        """Returns the bits of a weight after a number of optimizer steps of quantised training."""
        dropped = (steps // self.period).bit_length()
        return max(self.target_bits, self.start_bits - dropped)


def fitting_period(start_bits: int, target_bits: int, steps: float) -> int:
    """Returns the period by which the target is reached after half of the steps of quantised training.

    Args:
        start_bits: Bits at the start.
        target_bits: Bits at the end.
        steps: Number of optimizer steps of quantised training.
    """
    last = 2 ** max(start_bits - target_bits - 1, 0)
    return max(1, int(steps / 2 / last))
