"""Implements the compressed all-reduce of 1-bit Adam: one bit per element and direction, the same mean on all ranks.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021
(arXiv 2102.02888), section 4 and figure 3. Each rank is the server of one chunk:

1. Each rank adds its *worker error* to its values, compresses the sum, and keeps the loss as its new worker error;
   chunks are sent to their servers (an all-to-all).
2. Each server averages the chunks that it received, adds its *server error*, compresses again, and keeps the loss as
   its new server error; the chunks are sent to all ranks (an all-gather).

A later step sends what one step loses: over steps, the sum of the received values equals that of the sent ones, up to
the errors. All ranks decode the same bytes, so that the mean is bit-equal on all of them.

Signs and scales of a chunk are one message. The compressor keeps the signs, eight per byte, and one scale for each
block of elements:

- Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and Application to Data-Parallel Distributed Training of
  Speech DNNs", Interspeech 2014: signs with error feedback.
- Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021
  (arXiv 2102.02888): its use in an all-reduce.
- Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019
  (arXiv 1901.09847): why the scale is the mean absolute value.

Departures from 1-bit Adam: its scale is the 2-norm over the root of the number of elements, one per tensor. Here it is
the mean absolute value, which makes the error smallest and never larger than the compressed values (so that compression
is a contraction for any values). There is one scale per block, so that a large element affects its own block only. With
blocks of 256 an element takes 1.125 bits instead of 32.

Legend: n elements, a multiple of the block's size; b blocks.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.optimizers import copy_all

#: Number of bits of a byte.
_BYTE = 8
#: Factor that gathers eight bytes of 0 or 1, read as one number, in the top byte, the first one lowest.
_GATHER = 0x0102040810204080


def pack_signs(values: Tensor) -> Tensor:
    """Returns the signs of ``values`` [n], eight to a byte, the first in the lowest bit: uint8 [n / 8].

    A set bit is a positive sign; zero has a set bit, minus zero has not.

    Args:
        values: Contiguous floating-point tensor; n is a multiple of 8.
    """
    assert values.numel() % _BYTE == 0
    assert sys.byteorder == "little"
    positive = torch.signbit(values).logical_not_()
    words = positive.view(torch.int64) * _GATHER
    return words.view(torch.uint8).view(-1, _BYTE)[:, _BYTE - 1].contiguous()


def unpack_signs(packed: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the signs in bytes [n / 8] as 1 and -1: [n].

    Args:
        packed: Packed signs from :func:`pack_signs`.
        out: Memory for the result, float32 [n]; allocating new memory takes longer than unpacking.
    """
    out = torch.empty(packed.numel() * _BYTE, device=packed.device) if out is None else out
    torch.index_select(_table(packed.device), 0, packed.view(-1).int(), out=out.view(-1, _BYTE))
    return out


def block_scales(values: Tensor, counts: Tensor) -> Tensor:
    """Returns the mean absolute value of each block of ``values`` [n]: [b].

    Args:
        values: Values [n], in which padding is zero.
        counts: Number of elements of each block without padding, [b], at least 1.
    """
    return values.view(counts.numel(), -1).abs().sum(1).div_(counts)


def decompress(packed: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the values that signs and scales encode: [n].

    Args:
        packed: Packed signs of the values, [n / 8].
        scales: Scales of the blocks, [b].
        out: Memory for the result, as in :func:`unpack_signs`.
    """
    signs = unpack_signs(packed, out)
    signs.view(scales.numel(), -1).mul_(scales[:, None])
    return signs


def subtract_compressed_(values: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
    """Subtracts the decompressed values from ``values`` [n], in place, which leaves the compression error.

    The result is ``values - decompress(*compress(values))``, computed without unpacking.

    Args:
        values: Values that were compressed.
        scales: Scales of the compression, [b].
        scratch: Memory that is overwritten, [n].
    """
    blocks = values.view(scales.numel(), -1)
    sent = scratch.view(scales.numel(), -1)
    torch.copysign(scales[:, None].expand_as(blocks), blocks, out=sent)
    return blocks.sub_(sent).view(-1)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Returns the eight signs that each byte encodes: float32 [256, 8]."""
    bits = torch.arange(256)[:, None] >> torch.arange(_BYTE) & 1
    return (bits * 2 - 1).to(device, torch.float32)


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


#: Number of elements that share a scale.
BLOCK = 256


class CompressedAllReduce:
    """Compressed mean of a fixed list of tensors over the ranks, with one bit per element.

    Args:
        group: Process group, gloo or NCCL; None for the default group.
        block: Number of elements that share a scale, a multiple of 8.

    Attributes:
        layout: Layout of the tensors; None before the first mean.
        worker_error: Values that this rank has not sent yet, [numel of the layout].
        server_error: Values that this rank, as the server of its chunk, has not sent yet, [chunk].
        bytes_sent: Number of bytes that this rank has sent so far.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, block: int = BLOCK) -> None:
        assert block % 8 == 0
        self.communicator, self.block = Communicator(group), block
        self.layout: BlockLayout | None = None
        self.worker_error = self.server_error = torch.empty(0)
        self.bytes_sent = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.communicator.size

    @torch.no_grad()
    def average(self, tensors: list[Tensor]) -> None:
        """Replaces tensors by their compressed mean over the ranks; all ranks must call it.

        Args:
            tensors: Floating-point tensors, with the same shapes in the same order each time.
        """
        layout = self.prepare(tensors)
        rank, blocks = self.communicator.rank, layout.blocks
        torch._foreach_add_(self._worker_views, tensors)
        sent = self._compress(self.worker_error, self._counts, self._padding)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.communicator.group)

        for packed, scales in (self._split_message(message) for message in received.unbind()):
            self.server_error.add_(decompress(packed, scales, self._scratch[: layout.chunk]), alpha=1 / self.size)
        counts = self._counts[rank * blocks : (rank + 1) * blocks]
        sent[rank] = self._compress(self.server_error, counts, self._own_padding)[0]
        self.communicator.all_gather(sent.view(-1)).wait()

        for number, message in enumerate(sent.unbind()):
            decompress(
                *self._split_message(message), self._scratch[number * layout.chunk : (number + 1) * layout.chunk]
            )
        copy_all(tensors, self._scratch_views)
        self.bytes_sent += 2 * (self.size - 1) * sent[0].nbytes

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean of a scalar over the ranks."""
        result = value.detach().clone()
        dist.all_reduce(result, group=self.communicator.group)
        self.bytes_sent += 2 * (self.size - 1) * result.nbytes // self.size
        return result.div_(self.size)

    def reset(self) -> None:
        """Drops the errors and the layout."""
        self.layout, self.worker_error, self.server_error = None, torch.empty(0), torch.empty(0)

    def prepare(self, tensors: list[Tensor]) -> BlockLayout:
        """Returns the layout; allocates the errors, filled with zeros, if there are none yet."""
        sizes = tuple(tensor.numel() for tensor in tensors)
        if self.layout is not None:
            assert self.layout.sizes == sizes, "the tensors must be those of the first mean"
            return self.layout
        layout, device = BlockLayout(sizes, self.block, self.size), tensors[0].device
        self.layout = layout
        self.worker_error = torch.zeros(layout.numel, device=device)
        self.server_error = torch.zeros(layout.chunk, device=device)
        self._scratch = torch.empty(layout.numel, device=device)
        self._worker_views = layout.views(self.worker_error, tensors)
        self._scratch_views = layout.views(self._scratch, tensors)
        padding, first = layout.padding(), self.communicator.rank * layout.chunk
        own = padding[(padding >= first) & (padding < first + layout.chunk)] - first
        self._counts, self._padding, self._own_padding = layout.counts().to(device), padding.to(device), own.to(device)
        return layout

    def _compress(self, values: Tensor, counts: Tensor, padding: Tensor) -> Tensor:
        """Returns the messages of the chunks in ``values``, uint8 [chunks, bytes]; leaves the error in ``values``."""
        assert self.layout is not None
        chunks = values.numel() // self.layout.chunk
        scales = block_scales(values, counts)
        packed = pack_signs(values)
        subtract_compressed_(values, scales, self._scratch[: values.numel()])
        # A sign cannot be zero: padding was sent as nonzero values, which are not errors.
        values.index_fill_(0, padding, 0.0)
        return torch.cat([packed.view(chunks, -1), scales.view(chunks, -1).view(torch.uint8)], dim=1)

    def _split_message(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the packed signs and the scales in a message."""
        assert self.layout is not None
        bytes_of_signs = self.layout.chunk // 8
        return message[:bytes_of_signs], message[bytes_of_signs:].clone().view(torch.float32)


def all_reduce_bytes(nbytes: float, ranks: int) -> float:
    """Returns the bytes that each rank sends in a plain all-reduce, a reduce-scatter and an all-gather."""
    return 2 * nbytes * (ranks - 1) / ranks
