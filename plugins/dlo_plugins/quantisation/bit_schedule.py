"""Schedule of the bits of a weight in training: one bit less at a time, each time after twice as many steps, and later
in layers in whose weights the loss has a large curvature.

DeepSpeed's Mixture of Quantization (MoQ), 2021, https://www.deepspeed.ai/tutorials/MoQ-tutorial/: with a period of p
steps, a bit is dropped after p, 2p, 4p, ... steps of quantised training. DeepSpeed 0.19 has no MoQ any more. It
multiplied the period of a layer by `1 + floor(4 e)`, where e is the largest eigenvalue of its Hessian over that of all
layers. HAWQ-V2, Dong et al., 2019, arXiv 1911.03852, ranks layers by the mean of the Hessian's diagonal instead.
Departure: that diagonal is estimated by squared gradients (the empirical Fisher information), which each step has
already: power iterations need second derivatives, which fused attention kernels and sharded parameters do not give.
Bits are those of a layer, not of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlo_framework.distributed.step_primitives import torch_optimizer
from dlo_framework.shards import local_data
from dlo_plugins.sharding.stepped_gradients import (
    UnitNorms,
    accumulation_dtype,
    is_divided,
    scale_of,
    stepped_gradients,
)

#: Largest factor of a layer's period.
MOST = 5


class LayerCurvature:
    """Mean squared gradients of weights, over elements, steps and ranks.

    Args:
        sizes: Number of elements of each weight by its name, in full and in the same order on all ranks.

    Attributes:
        steps: Number of steps that were added.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.steps = dict(sizes), 0
        self._sums: Tensor | None = None  # of each weight, on the device
        self._norms: tuple[int, UnitNorms] | None = None  # of divided weights, by the optimizer's id

    @torch.no_grad()
    def add(self, strategy: Any, optimizer: Any) -> None:
        """Adds the gradients with which an optimizer is about to step; called on all ranks."""
        stepped = [one for one in stepped_gradients(strategy, optimizer) if one.name in self.sizes]
        device, inner = strategy.root_device, torch_optimizer(optimizer)
        dtype = accumulation_dtype(device)
        if is_divided(strategy, stepped):
            if self._norms is None or self._norms[0] != id(inner):
                self._norms = id(inner), UnitNorms(list(self.sizes), stepped, device)
            norms = self._norms[1]
            rows = norms.measure(stepped)[1].square()
            squares = torch.stack([part.sum() for part in rows.split(norms.sizes)])
        else:
            squares = torch.zeros(len(self.sizes), dtype=dtype, device=device)
            places = {name: number for number, name in enumerate(self.sizes)}
            for one in stepped:
                if one.gradient is not None:
                    squares[places[one.name]] = local_data(one.gradient).to(dtype).square().sum()
        elements = torch.tensor(list(self.sizes.values()), dtype=dtype, device=device)
        means = squares / elements / scale_of(strategy) ** 2
        means.nan_to_num_(nan=0, posinf=0)  # A step that a loss scaler leaves out.
        self._sums = means if self._sums is None else self._sums + means
        self.steps += 1

    def factors(self) -> list[int]:
        """Returns the factor of each weight's period, from 1 to :data:`MOST`."""
        values = self.state()["sums"]
        most = max(values, default=0.0)
        return [1 + int((MOST - 1) * value / most) if most else 1 for value in values]

    def state(self) -> dict[str, Any]:
        """Returns sums and steps as plain data."""
        return {"sums": [] if self._sums is None else self._sums.tolist(), "steps": self.steps}

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Restores what :meth:`state` has returned."""
        self.steps = state["steps"]
        self._sums = (
            torch.tensor(state["sums"], dtype=accumulation_dtype(device), device=device) if state["sums"] else None
        )


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
