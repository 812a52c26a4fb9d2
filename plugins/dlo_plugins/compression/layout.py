"""Where tensors stand in a flat buffer that is compressed block by block and divided among the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Tensors one after the other, each from a block's edge on; the ranks get equal chunks of whole blocks.

    A block holds elements of one tensor alone, for gains and biases are of another size than weights.

    Attributes:
        sizes: elements of each tensor.
        block: elements of a block, a multiple of 8.
        ranks: how many chunks there are.
    """

    sizes: tuple[int, ...]
    block: int
    ranks: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts."""
        starts, at = [], 0
        for size in self.sizes:
            starts.append(at)
            at += self._padded(size)
        return tuple(starts)

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        used = sum(self._padded(size) for size in self.sizes)
        whole = self.block * self.ranks
        return max(1, -(-used // whole)) * whole

    @property
    def chunk(self) -> int:
        """Elements of a rank's chunk."""
        return self.numel // self.ranks

    @property
    def blocks(self) -> int:
        """Blocks of a rank's chunk."""
        return self.chunk // self.block

    def views(self, buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Returns the tensors' places in a buffer, each shaped as the tensor it is for."""
        return [
            buffer[start : start + size].view_as(tensor)
            for start, size, tensor in zip(self.offsets, self.sizes, like, strict=True)
        ]

    def counts(self) -> Tensor:
        """Returns how many elements of each block belong to a tensor, at least 1: float32 [blocks of all ranks]."""
        counts = torch.ones(self.numel // self.block)
        for start, size in zip(self.offsets, self.sizes, strict=True):
            first, last = start // self.block, (start + self._padded(size)) // self.block
            counts[first:last] = self.block
            if size % self.block:
                counts[last - 1] = size % self.block
        return counts

    def padding(self) -> Tensor:
        """Returns the positions that belong to no tensor, in order: int64."""
        ends = [*self.offsets[1:], self.numel]
        gaps = [
            torch.arange(start + size, end) for start, size, end in zip(self.offsets, self.sizes, ends, strict=True)
        ]
        return torch.cat(gaps)

    def _padded(self, size: int) -> int:
        return -(-size // self.block) * self.block
