"""Norms of units, such as rows of linear layers, over the ranks that hold their elements.

A rank may hold any slices of a parameter: rows (FSDP), columns (tensor parallelism) or a range that begins inside a row
(ZeRO). Each rank adds up squares by unit, and one all-reduce of two numbers a unit completes the sums. Ranks with equal
copies, such as replicas, count elements too: a unit's sum is divided by the number of its copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.shards import Box, held_boxes
from dlo_plugins.sharding.stepped_gradients import SteppedGradient, accumulation_dtype


def unit_norms(tensor: Tensor) -> Tensor:
    """Returns the 2-norm of each unit of a parameter or its gradient, in a shape that broadcasts with it.

    A unit is the slice of the parameter that computes one output feature: a row of a linear layer's weight, a filter of
    a convolution. A vector, such as a bias or the gain of a norm, is one unit. Half precision is summed in float32.
    """
    dim = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=tensor.ndim > 1, dtype=dtype)


class UnitNorms:
    """Norms of the units of parameters that ranks divide; made and called on all ranks.

    Args:
        names: Names of the parameters, in an order that is the same on all ranks.
        stepped: This rank's shards of some of them.
        device: Device of collectives.
        group: Ranks that have the same gradients together; None for all.

    Attributes:
        names: Names of the parameters.
        sizes: Number of units of each parameter.
    """

    def __init__(
        self,
        names: Sequence[str],
        stepped: Sequence[SteppedGradient],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.names, self._device, self._group = list(names), device, group
        numbers = {name: number for number, name in enumerate(self.names)}
        shapes = torch.zeros(2, len(self.names), dtype=torch.int64)
        for one in stepped:
            shape = one.weight.shape
            units = shape[0] if len(shape) > 1 else 1
            shapes[:, numbers[one.name]] = torch.tensor([units, math.prod(shape[1:]) if len(shape) > 1 else sum(shape)])
        shapes = shapes.to(device)
        dist.all_reduce(shapes, dist.ReduceOp.MAX, group=group)
        self.sizes = shapes[0].tolist()
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        self._starts = dict(zip(self.names, ends, strict=False))
        self._count, self._numbers = ends[-1], numbers
        held = self._zeros(self._count)
        for one in stepped:
            for box, _ in held_boxes(one.weight):
                self._part(held, one.name, box).add_(box.numel / max(1, box.sizes[0] if len(box.sizes) > 1 else 1))
        dist.all_reduce(held, group=group)
        elements = torch.repeat_interleave(shapes[1].clamp(min=1), shapes[0], output_size=self._count)
        #: Number of copies of each unit among the ranks.
        self.copies = held / elements
        self.copies.clamp_(min=torch.finfo(held.dtype).tiny)  # A unit without elements has none.

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, dtype=accumulation_dtype(self._device), device=self._device)

    def _part(self, values: Tensor, name: str, box: Box) -> Tensor:
        """Returns the entries of a box's units in a tensor of all units."""
        start = self._starts[name]
        if len(box.sizes) < 2:
            return values[start : start + 1]
        return values[start + box.offsets[0] : start + box.offsets[0] + box.sizes[0]]

    @torch.no_grad()
    def measure(self, stepped: Sequence[SteppedGradient]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the norms of all units' weights and gradients, and whether a unit's parameter has a gradient.

        Args:
            stepped: This rank's shards.
        """
        found = self._zeros(2 * self._count + len(self.names))
        weights, gradients, used = found.split([self._count, self._count, len(self.names)])
        for one in stepped:
            self._add_squares(weights, one.name, one.weight)
            if one.gradient is not None:
                self._add_squares(gradients, one.name, one.gradient)
                used[self._numbers[one.name]] = 1
        dist.all_reduce(found, group=self._group)
        sizes = torch.tensor(self.sizes, device=self._device)
        is_used = torch.repeat_interleave(used > 0, sizes, output_size=self._count)
        return (weights / self.copies).sqrt_(), (gradients / self.copies).sqrt_(), is_used

    def _add_squares(self, sums: Tensor, name: str, shard: Any) -> None:
        for box, view in held_boxes(shard):
            self._part(sums, name, box).add_(unit_norms(view).flatten().to(sums).square_())

    @torch.no_grad()
    def scale_(self, stepped: Sequence[SteppedGradient], factors: Tensor) -> None:
        """Multiplies each unit's gradient by its factor, in place.

        Args:
            stepped: This rank's shards.
            factors: Factors of all units.
        """
        by_device = {factors.device: factors}
        for one in stepped:
            for box, view in held_boxes(one.gradient) if one.gradient is not None else ():
                if view.device not in by_device:
                    by_device[view.device] = factors.to(view.device)
                own = self._part(by_device[view.device], one.name, box)
                view.mul_(own.view(-1, *(1,) * (view.ndim - 1)) if view.ndim > 1 else own.view(()))
