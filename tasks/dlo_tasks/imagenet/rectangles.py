"""Rectangular validation: crops near each image's own shape, batched with others of the same shape.

The method is fast.ai's, for DAWNBench 2018 ("Training ImageNet in 18 minutes", Howard et al.). There a batch has the
mean shape of its images, so that accuracy depends on the batch size; here the shape is each image's own, rounded down.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dlo_framework.data import Draw, ResumableBatchSampler
from dlo_tasks.imagenet.decode import CorruptImageError, read_size
from dlo_tasks.imagenet.image_sources import ImageSource

_READERS = 16  # threads; on a network drive most of the time is spent waiting

#: Number of bytes that usually contain an image file's header; thumbnails and large colour profiles need more.
_HEAD = 1 << 16

Size = tuple[int, int]


def rectangle(height: int, width: int, size: int, multiple: int, max_ratio: float) -> Size:
    """Returns the (height, width) that an image of this shape is cropped to.

    Args:
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.
        size: Shorter side of the result, in pixels.
        multiple: Number of pixels to a multiple of which the longer side is rounded down.
        max_ratio: Maximum ratio of the longer side to the shorter one.
    """
    ratio = min(max(height, width) / min(height, width), max_ratio)
    longer = max(size, math.floor(size * ratio / multiple) * multiple)
    return (longer, size) if height > width else (size, longer)


def read_sizes(source: ImageSource, *, skip_corrupt: bool) -> list[Size]:
    """Returns the (height, width) of each image, from the headers of the files.

    Args:
        source: Source of the image files.
        skip_corrupt: Whether to treat an unreadable image as a square one; loading it will count it.

    Raises:
        CorruptImageError: For the first file that cannot be read, with its name.
    """

    def size_of(index: int) -> Size:
        try:
            size = read_size(source.read(index, _HEAD)) or read_size(source.read(index))
        except OSError:
            size = None
        if size is None and not skip_corrupt:
            raise CorruptImageError(f"corrupt image {source.name(index)} (index {index}); set on_corrupt=skip")
        return size or (1, 1)

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(size_of, range(len(source))))


class RectangleBatchSampler(ResumableBatchSampler):
    """Sampler that visits each sample once, from tallest to widest; all samples of a rank's batch have the same shape.

    Batches of different ranks may have different shapes. They are made smaller until all ranks have the same number.

    Args:
        shapes: Crop (height, width) of each sample.
        batch_size: Maximum number of samples in a batch on one rank.
        rank: Data-parallel rank of this process.
        world_size: Number of data-parallel ranks.
    """

    def __init__(self, shapes: Sequence[Size], *, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(
            len(shapes), batch_size=batch_size, shuffle=False, rank=rank, world_size=world_size, drop_last=False
        )
        self.shapes = list(shapes)
        sides = np.array(self.shapes)  # [N, 2]
        self._order = np.lexsort((sides[:, 0], sides[:, 1] / sides[:, 0]))  # stable: keeps the data's order in a shape
        changes = np.flatnonzero((np.diff(sides[self._order], axis=0) != 0).any(axis=1)) + 1
        bounds = [0, *changes.tolist(), len(shapes)]
        self._batches = equal_batches(bounds, batch_size, world_size)

    def __len__(self) -> int:
        """Number of batches per rank, the same on each."""
        return -(-len(self._batches) // self.world_size)

    @property
    def leaves_ranks_out(self) -> bool:
        """Whether there are too few samples to give all ranks the same number of batches."""
        return len(self._batches) % self.world_size > 0

    def spans_from(self, samples: int) -> Iterator[tuple[int, int]]:
        """Yields (start, stop) of the ranks' batches of one step, after the first ``samples`` samples."""
        for group in self._groups(samples):
            yield group[0][0], group[-1][1]

    def batches_from(self, samples: int) -> Iterator[list[Draw]]:
        """Yields this rank's batches, after the first ``samples`` samples of the order."""
        indices, seeds = self._epoch_draws()
        for group in self._groups(samples):
            real = self.rank < len(group)
            first, past = group[self.rank] if real else (group[0][0], group[0][0] + 1)
            drawn = zip(indices[first:past].tolist(), seeds[first:past].tolist(), strict=True)
            yield [Draw(index, seed, real, self.shapes[index]) for index, seed in drawn]

    def _groups(self, samples: int) -> Iterator[list[tuple[int, int]]]:
        for number in range(0, len(self._batches), self.world_size):
            if self._batches[number][0] >= samples:
                yield self._batches[number : number + self.world_size]

    def _epoch_draws(self) -> tuple[np.ndarray, np.ndarray]:
        indices, seeds = super()._epoch_draws()
        return indices[self._order], seeds[self._order]


def equal_batches(bounds: Sequence[int], batch_size: int, ranks: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of batches that cross no bound, in a number that the ranks divide.

    The largest batches are halved until the ranks divide their number; this stops when each has one sample.

    Args:
        bounds: Start indices of the shapes, ascending, with 0 and the number of samples.
        batch_size: Maximum number of samples in a batch.
        ranks: Number of ranks that share the batches.
    """
    batches = [
        (start, min(start + batch_size, past))
        for first, past in itertools.pairwise(bounds)
        for start in range(first, past, batch_size)
    ]
    while len(batches) % ranks:
        number = max(range(len(batches)), key=lambda number: batches[number][1] - batches[number][0])
        start, stop = batches[number]
        if stop - start == 1:
            break
        middle = (start + stop + 1) // 2
        batches[number : number + 1] = [(start, middle), (middle, stop)]
    return batches
