"""Block-sparse attention by FlexAttention, compiled on an accelerator. It has not run on a GPU.

FlexAttention: A Programming Model for Generating Optimized Attention Kernels. Dong et al., 2024, arXiv 2412.05496. Its
C++ kernel for CPUs has no backward (torch 2.14), so that `gathered_blocks` trains there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dlo_framework.attention.attention_mask import AttentionMask, LocalHeads

#: Positions per block of FlexAttention; its kernels need multiples of 128.
BLOCK = 128


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    documents: Tensor | None = None,
    *,
    heads: LocalHeads | None = None,
    scale: float | None = None,
) -> Tensor:
    """Returns attention under a mask, `[B, H, L, E]`; arguments as in :func:`~.gathered_blocks.attend_blocks`."""
    blocks = flex_mask(mask, query.shape[2], heads, documents, query.device)
    compute: Any = flex_attention if query.device.type == "cpu" or torch.compiler.is_compiling() else _compiled()
    grouped = key.shape[1] != query.shape[1]
    out: Tensor = compute(query, key, value, block_mask=blocks, scale=scale, enable_gqa=grouped)
    return out


def flex_mask(
    mask: AttentionMask, length: int, heads: LocalHeads | None, documents: Tensor | None, device: torch.device
) -> BlockMask:
    """Returns FlexAttention's block mask.

    Its blocks are coarser than a pattern's: the function of positions reads the pattern's own layout.

    Args:
        mask: Mask.
        length: Number of positions.
        heads: Heads of queries on this rank; None for all.
        documents: Number of the document of each position, `[B, L]`; None for one document per row.
        device: Device of the mask.
    """
    # Each layer of each step asks for it: the tensors are made and copied to the device once.
    make = functools.partial(_coarse_blocks, mask, length, heads, device)
    counts, order, table = mask.cached(("flex", length, heads, device), make)
    size, single = mask.pattern.block, len(table) == 1

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = table[0 if single else h, q // size, k // size] & mask._rules(q, k)
        return found if documents is None else found & (documents[b, q] == documents[b, k])

    return BlockMask.from_kv_blocks(
        counts[None],
        order[None],
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _coarse_blocks(
    mask: AttentionMask, length: int, heads: LocalHeads | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the numbers of FlexAttention's blocks that each of its blocks sees, their order, and the layout."""
    layout, size = mask.layout(length, heads), mask.pattern.block  # [h, N, N]
    # A block of either size can reach into several of the other.
    first, start = torch.arange(layout.shape[-1]) * size, torch.arange(-(-length // BLOCK)) * BLOCK
    overlaps = ((first < start[:, None] + BLOCK) & (first + size > start[:, None])).float()  # [coarse, N]
    seen = overlaps @ layout.float() @ overlaps.mT > 0
    order = seen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return seen.sum(-1, dtype=torch.int32).to(device), order.to(device), layout.to(device)


@functools.lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention)
