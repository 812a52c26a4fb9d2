"""Location of saved tensors: the boxes of each tensor, and their byte ranges in the files.

Ranks that shard a tensor evenly write boxes of one size at the same offset of their files. Such boxes form one
:class:`Run`, so that a tensor's entry in the manifest does not grow with the ranks that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from dlo_framework.checkpoint.shards import Box, overlap

Key = tuple[str, str]


@dataclass(frozen=True)
class Chunk:
    """Box of a tensor and its bytes ``[begin, end)`` in ``file``."""

    box: Box
    file: str
    begin: int
    end: int


class Run(NamedTuple):
    """Boxes of one size, contiguous along a dim, at the same offset of several files.

    Attributes:
        box: First box of the run.
        shard: Number of the first box's file.
        begin: Offset of the box, in bytes from the first tensor in the file; the same in all files.
        length: Number of boxes.
        dim: Dimension along which the boxes follow each other.
        stride: Difference between the numbers of successive files.
    """

    box: Box
    shard: int
    begin: int
    length: int = 1
    dim: int = 0
    stride: int = 1

    @property
    def shards(self) -> range:
        """The numbers of the files."""
        return range(self.shard, self.shard + self.length * self.stride, self.stride)

    def box_at(self, number: int) -> Box:
        """Returns the box of this number, counted from 0."""
        return self.box if number == 0 else _moved(self.box, self.dim, number)

    @property
    def union(self) -> Box:
        """The union of the boxes."""
        offsets, sizes = self.box
        return self.box if self.length == 1 else Box(offsets, _with(sizes, self.dim, sizes[self.dim] * self.length))


class Runs(Sequence[Chunk]):
    """Sequence of a tensor's chunks, each constructed on access.

    Args:
        runs: Runs that the chunks belong to.
        element: Size of an element, in bytes.
        starts: {shard number: offset in bytes of the shard's first tensor}.
    """

    def __init__(self, runs: Sequence[Run], element: int, starts: Mapping[int, int]) -> None:
        self.runs = runs
        self._element, self._starts = element, starts

    def __len__(self) -> int:
        return sum(run.length for run in self.runs)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        return list(self)[index]

    def __iter__(self) -> Iterator[Chunk]:
        return (self._chunk(run, number) for run in self.runs for number in range(run.length))

    def overlapping(self, box: Box) -> Iterator[Chunk]:
        """Yields the chunks that overlap a box; the others cost nothing."""
        for run in self.runs:
            shared = overlap(run.union, box)
            if shared is None:
                continue
            first = last = 0
            if run.length > 1:
                at, size = shared.offsets[run.dim] - run.box.offsets[run.dim], run.box.sizes[run.dim]
                first, last = at // size, (at + shared.sizes[run.dim] - 1) // size
            yield from (self._chunk(run, number) for number in range(first, last + 1))

    def _chunk(self, run: Run, number: int) -> Chunk:
        shard = run.shards[number]
        begin = self._starts[shard] + run.begin
        return Chunk(run.box_at(number), shard_name(shard), begin, begin + run.box.numel * self._element)


@dataclass
class SavedTensor:
    """Tensor in a checkpoint: its dtype, its shape, and the chunks that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk] = field(default_factory=list)

    def overlapping(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """Yields each chunk that overlaps a box, with the overlap."""
        for chunk in self.chunks.overlapping(box) if isinstance(self.chunks, Runs) else self.chunks:
            shared = overlap(chunk.box, box)
            if shared is not None:
                yield chunk, shared


def shard_name(number: int) -> str:
    """Returns the name of the file that a rank writes."""
    return f"shard-{number:05d}.safetensors"


def shard_number(name: str) -> int | None:
    """Returns the number in a name made by :func:`shard_name`; None for other names."""
    digits = name.removeprefix("shard-").removesuffix(".safetensors")
    return int(digits) if digits.isdecimal() and shard_name(int(digits)) == name else None


def next_box(box: Box, dim: int) -> Box:
    """Returns the next box of the same size along a dim."""
    return _moved(box, dim, 1)


def _moved(box: Box, dim: int, steps: int) -> Box:
    offsets, sizes = box
    return Box(_with(offsets, dim, offsets[dim] + steps * sizes[dim]), sizes)


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
