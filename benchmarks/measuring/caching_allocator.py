"""Replay of the caching allocator of torch on CUDA, to count what it reserves.

Rules of torch's `c10/cuda/CUDACachingAllocator.cpp` with its defaults (no expandable segments, no limit of the split):
sizes are rounded up to 512 bytes; up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB,
and larger ones get a segment of their own, rounded up to 2 MiB. A request takes the smallest free block that is large
enough, and splits it where more than 1 MiB is left. Free neighbours of one segment merge. Where the device has no
memory left, free segments are returned to it first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 1 << 20
_SMALL = _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, _ROUNDING = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB


@dataclass
class _Block:
    """Block of a segment.

    Attributes:
        size: Bytes.
        before: Address of the block before it in the segment; None for the first.
        after: Address of the block after it; None for the last.
        is_free: Whether no tensor has it.
    """

    size: int
    before: int | None = None
    after: int | None = None
    is_free: bool = False


class CachingAllocator:
    """Allocator whose memory is counted, not taken.

    Args:
        capacity: Bytes of the device that can be reserved.

    Attributes:
        peak: Largest number of reserved bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._next = capacity, 0
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # (size, address) of each pool.
        self._blocks: dict[int, _Block] = {}
        self._is_large: dict[int, bool] = {}
        self._sizes: dict[int, int] = {}
        self.reserved = self.peak = 0

    def allocate(self, size: float) -> int:
        """Returns the address of a new tensor of a number of bytes."""
        rounded = max(512, -(-int(size) // 512) * 512)
        is_large = rounded > _SMALL
        free = self._free[is_large]
        at = bisect_left(free, (rounded, 0))
        if at == len(free):
            self._add_segment(rounded, is_large)
            at = bisect_left(free, (rounded, 0))
        size_found, address = free.pop(at)
        block = self._blocks[address]
        block.is_free = False
        rest = size_found - rounded
        if rest > _SMALL if is_large else rest >= 512:
            self._split(address, rounded)
        return address

    def release(self, address: int) -> None:
        """Frees the tensor at an address."""
        free = self._free[self._is_large[address]]
        block = self._blocks[address]
        if block.after is not None and self._blocks[block.after].is_free:
            self._merge(address, free)
        if block.before is not None and self._blocks[block.before].is_free:
            before = self._blocks[block.before]
            free.pop(bisect_left(free, (before.size, block.before)))
            address = self._absorb(block.before, address)
        self._blocks[address].is_free = True
        insort(free, (self._blocks[address].size, address))

    def _add_segment(self, size: int, is_large: bool) -> None:
        segment = _SMALL_SEGMENT
        if is_large:
            segment = _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _ROUNDING) * _ROUNDING
        if self.reserved + segment > self._capacity:
            self._return_free_segments()
        self.reserved += segment
        self.peak = max(self.peak, self.reserved)
        address, self._next = self._next, self._next + segment + _ROUNDING  # Segments are never neighbours.
        self._blocks[address] = _Block(segment, is_free=True)
        self._is_large[address] = is_large
        self._sizes[address] = segment
        insort(self._free[is_large], (segment, address))

    def _return_free_segments(self) -> None:
        for free in self._free:
            whole = [(size, address) for size, address in free if self._sizes.get(address) == size]
            for size, address in whole:
                free.remove((size, address))
                self.reserved -= size
                del self._blocks[address], self._sizes[address], self._is_large[address]

    def _split(self, address: int, size: int) -> None:
        block, rest = self._blocks[address], address + size
        self._blocks[rest] = _Block(block.size - size, address, block.after, is_free=True)
        if block.after is not None:
            self._blocks[block.after].before = rest
        block.size, block.after = size, rest
        self._is_large[rest] = self._is_large[address]
        insort(self._free[self._is_large[address]], (self._blocks[rest].size, rest))

    def _merge(self, address: int, free: list[tuple[int, int]]) -> None:
        after = self._blocks[address].after
        assert after is not None
        free.pop(bisect_left(free, (self._blocks[after].size, after)))
        self._absorb(address, after)

    def _absorb(self, address: int, after: int) -> int:
        """Joins a block with the next one of its segment, and returns its address."""
        block, gone = self._blocks[address], self._blocks.pop(after)
        del self._is_large[after]
        block.size, block.after = block.size + gone.size, gone.after
        if gone.after is not None:
            self._blocks[gone.after].before = address
        return address
