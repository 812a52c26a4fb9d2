"""Compresses tensors to one bit per element: signs, eight per byte, and one scale for each block of elements.

- Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and Application to Data-Parallel Distributed Training of
  Speech DNNs", Interspeech 2014: signs with error feedback.
- Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021
  (arXiv 2102.02888): the compressor behind :class:`~dlo_plugins.compression.compressed_all_reduce.CompressedAllReduce`.
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

import torch
from torch import Tensor

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
