"""Computes the layout of tensors in a flat buffer that is compressed by blocks and divided among the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a flat buffer: each tensor begins at a block, and ranks get equal chunks of full blocks.

    A block has elements of one tensor only, because gains and biases have another magnitude than weights.

    Attributes:
        sizes: Number of elements of each tensor.
        block: Number of elements of a block, a multiple of 8.
        ranks: Number of ranks, which is the number of chunks.
    """

    sizes: tuple[int, ...]
    block: int
    ranks: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each tensor in the buffer."""
        starts, at = [], 0
        for size in self.sizes:
            starts.append(at)
            at += self._padded(size)
        return tuple(starts)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the buffer, padding included."""
        used = sum(self._padded(size) for size in self.sizes)
        whole = self.block * self.ranks
        return max(1, -(-used // whole)) * whole

    @property
    def chunk(self) -> int:
        """Number of elements of a rank's chunk."""
        return self.numel // self.ranks

    @property
    def blocks(self) -> int:
        """Number of blocks of a rank's chunk."""
        return self.chunk // self.block

    def views(self, buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Returns views of a buffer, one for each tensor and in its shape."""
        return [
            buffer[start : start + size].view_as(tensor)
            for start, size, tensor in zip(self.offsets, self.sizes, like, strict=True)
        ]

    def counts(self) -> Tensor:
        """Returns the number of tensor elements of each block, at least 1: float32 [blocks of all ranks]."""
        counts = torch.ones(self.numel // self.block)
        for start, size in zip(self.offsets, self.sizes, strict=True):
            first, last = start // self.block, (start + self._padded(size)) // self.block
            counts[first:last] = self.block
            if size % self.block:
                counts[last - 1] = size % self.block
        return counts

    def padding(self) -> Tensor:
        """Returns the positions of padding, in order: int64 [number of padding elements]."""
        ends = [*self.offsets[1:], self.numel]
        gaps = [
            torch.arange(start + size, end) for start, size, end in zip(self.offsets, self.sizes, ends, strict=True)
        ]
        return torch.cat(gaps)

    def _padded(self, size: int) -> int:
        return -(-size // self.block) * self.block
