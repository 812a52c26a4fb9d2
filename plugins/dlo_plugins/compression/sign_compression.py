"""One bit an element: signs, eight to a byte, and one scale for each block of elements.

- Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and Application to Data-Parallel Distributed Training of
  Speech DNNs", Interspeech 2014: signs with error feedback.
- Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021
  (arXiv 2102.02888): the compressor behind :class:`~dlo_plugins.compression.all_reduce.CompressedAllReduce`.
- Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019
  (arXiv 1901.09847): why the scale is the mean absolute value.

Where this departs from 1-bit Adam: its scale is the 2-norm over the root of the number of elements, one a tensor. Here
it is the mean absolute value, which is what makes the error smallest, and never larger than what was compressed
(so compressing is a contraction, whatever the values); and one a block, so that a large element spoils its own block
alone. With blocks of 256 an element takes 1.125 bits in place of 32.

Legend: n elements, a multiple of the block's size; b blocks.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor

#: Bits of a byte.
_BYTE = 8
#: Multiplied with eight bytes of 0 or 1, read as one number, it gathers them, the first one lowest, in the top byte.
_GATHER = 0x0102040810204080


def pack_signs(values: Tensor) -> Tensor:
    """Returns the signs of ``values`` [n], eight to a byte, the first in the lowest bit: uint8 [n / 8].

    A set bit is a positive sign; zero has one, and minus zero has not.

    Args:
        values: floating point, contiguous; n is a multiple of 8.
    """
    assert values.numel() % _BYTE == 0
    assert sys.byteorder == "little"
    positive = torch.signbit(values).logical_not_()
    words = positive.view(torch.int64) * _GATHER
    return words.view(torch.uint8).view(-1, _BYTE)[:, _BYTE - 1].contiguous()


def unpack_signs(packed: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the signs in bytes [n / 8] as 1 and -1: [n].

    Args:
        packed: see :func:`pack_signs`.
        out: memory for the result, float32 [n]; new memory takes longer to be mapped than signs to be unpacked.
    """
    out = torch.empty(packed.numel() * _BYTE, device=packed.device) if out is None else out
    torch.index_select(_table(packed.device), 0, packed.view(-1).int(), out=out.view(-1, _BYTE))
    return out


def block_scales(values: Tensor, counts: Tensor) -> Tensor:
    """Returns the mean absolute value of each block of ``values`` [n]: [b].

    Args:
        values: elements that do not count are zero.
        counts: how many of each block's elements count, [b]; none is 0.
    """
    return values.view(counts.numel(), -1).abs().sum(1).div_(counts)


def decompress(packed: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns what signs and scales have kept of the values: [n].

    Args:
        packed: their signs.
        scales: of their blocks.
        out: see :func:`unpack_signs`.
    """
    signs = unpack_signs(packed, out)
    signs.view(scales.numel(), -1).mul_(scales[:, None])
    return signs


def subtract_compressed_(values: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
    """Takes from ``values`` [n], in place, what :func:`decompress` makes of them; what is left is the error.

    The same as ``values - decompress(*compress(values))``, without unpacking.

    Args:
        values: what was compressed.
        scales: what it was compressed with, [b].
        scratch: memory that is written over, [n].
    """
    blocks = values.view(scales.numel(), -1)
    sent = scratch.view(scales.numel(), -1)
    torch.copysign(scales[:, None].expand_as(blocks), blocks, out=sent)
    return blocks.sub_(sent).view(-1)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Returns the eight signs that each byte stands for: float32 [256, 8]."""
    bits = torch.arange(256)[:, None] >> torch.arange(_BYTE) & 1
    return (bits * 2 - 1).to(device, torch.float32)
