"""Gaussian noise of a tensor by global index: a rank draws its slices' noise, whatever slices it holds.

A tensor is divided in chunks of at most :data:`CHUNK` consecutive elements, by its shape alone. Each chunk has a
generator of its own, seeded by the run's seed, the step, the tensor's name and the chunk's number. A rank draws the
chunks that its slices overlap, one at a time: a slice of columns draws full rows, and drops the others' elements.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dlo_framework.data.hashing import hash64
from dlo_framework.shards import Box, Shard, held_boxes

#: Most elements of a chunk: 4 MB in single precision. The noise depends on it.
CHUNK = 1 << 20


def name_key(name: str) -> int:
    """Returns a number of 63 bits that depends on a name alone."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


class IndexedNoise:
    """Standard Gaussian noise that is a function of seed, step, name and index.

    Numbers are drawn in single precision. Another type of device draws other numbers.

    Args:
        seed: Seed of the run.
        step: Number of the optimizer step.
        stream: Number of the random stream, so that other uses of the seed draw other numbers.
    """

    def __init__(self, seed: int, step: int, stream: int) -> None:
        self._mixed = int(hash64(np.array([step]), seed, stream)[0] >> np.uint64(1))
        self._stream = stream
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def add_(self, name: str, shard: Shard, deviation: float) -> None:
        """Adds noise to a shard in place.

        Args:
            name: Name of the full tensor.
            shard: Shard of the tensor.
            deviation: Standard deviation.
        """
        key = name_key(name)
        drawn: tuple[int, Tensor] | None = None  # A flat slice's boxes may share a chunk.
        for box, view in held_boxes(shard):
            for number, shape, inside, part in overlaps(tuple(shard.shape), box):
                if drawn is None or drawn[0] != number:
                    drawn = number, self._draw(key, number, shape, view)
                noise, target = drawn[1], view
                for dim, (start, size) in enumerate(zip(inside.offsets, inside.sizes, strict=True)):
                    noise = noise.narrow(dim, start, size)
                for dim, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                    target = target.narrow(dim, start, size)
                target.add_(noise.reshape(target.shape), alpha=deviation)

    def _draw(self, key: int, number: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        device = like.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        seed = int(hash64(np.array([number]), self._mixed ^ key, self._stream)[0] >> np.uint64(1))
        generator = self._generators[device].manual_seed(seed)
        dtype = torch.complex64 if like.is_complex() else torch.float32
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def overlaps(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, tuple[int, ...], Box, Box]]:
    """Yields the chunks of a tensor that a box overlaps, in row-major order.

    A chunk is a range along the first dim whose later dims are at most :data:`CHUNK` elements; the dims before have one
    index each.

    Args:
        shape: Shape of the tensor.
        box: Box in the tensor.

    Yields:
        The chunk's number, its shape, the overlap in the chunk, and the overlap in the box.
    """
    if not shape:
        yield 0, (1,), Box((0,), (1,)), Box((), ())
        return
    if box.numel == 0:
        return
    along = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= CHUNK)
    inner = shape[along + 1 :]
    length = max(1, CHUNK // max(1, math.prod(inner)))
    per_index = -(-shape[along] // length)  # chunks of one index of the dims before
    first, last = box.offsets[along], box.offsets[along] + box.sizes[along]
    for outer in np.ndindex(*box.sizes[:along]):
        place = 0
        for dim, at in enumerate(outer):
            place = place * shape[dim] + box.offsets[dim] + at
        for chunk in range(first // length, (last - 1) // length + 1):
            start, stop = max(first, chunk * length), min(last, (chunk + 1) * length)
            size = min(length, shape[along] - chunk * length)
            inside = Box((start - chunk * length, *box.offsets[along + 1 :]), (stop - start, *box.sizes[along + 1 :]))
            part = Box(
                (*outer, start - first, *(0 for _ in inner)),
                (*(1 for _ in outer), stop - start, *box.sizes[along + 1 :]),
            )
            yield place * per_index + chunk, (size, *inner), inside, part
