"""Block-sparse attention by FlexAttention, compiled on an accelerator.

FlexAttention: A Programming Model for Generating Optimized Attention Kernels. Dong et al., 2024, arXiv 2412.05496. Its
C++ kernel for CPUs has no backward (torch 2.14), so that gathered blocks train there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dlo_framework.attention.attention_mask import AttentionMask, LocalHeads

#: Positions per block of FlexAttention; its kernels need multiples of 128.
BLOCK = 128
#: Least width of heads of its CUDA kernels (torch 2.11 to 2.15); narrower ones are padded with zeros.
NARROWEST = 16


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
    """Returns attention under a mask, `[B, H, L, E]`; arguments as in :func:`~.masked_attention.attend_blocks`."""
    blocks = flex_mask(mask, query.shape[2], heads, documents, query.device)
    return run_flex(query, key, value, blocks, query.shape[-1] ** -0.5 if scale is None else scale)


def run_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: BlockMask,
    scale: float,
    score_mod: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Returns FlexAttention's output, `[B, H, L, E]`, compiled on an accelerator unless the caller is being compiled.

    Args:
        query: Queries, `[B, H, L, D]`.
        key: Keys, `[B, K, L, D]`; H is a multiple of K.
        value: Values, `[B, K, L, E]`.
        blocks: Mask.
        scale: Factor of scores.
        score_mod: Function of the scaled scores, as in FlexAttention.
    """
    grouped, wide = key.shape[1] != query.shape[1], value.shape[-1]
    if _runs_eagerly(query):
        found: Any = flex_attention(query, key, value, score_mod, blocks, scale, enable_gqa=grouped)
        return found
    query, key, value = (_widen(tensor) for tensor in (query, key, value))
    with _no_function_modes():
        out: Tensor = _compiled()(query, key, value, score_mod, blocks, scale, enable_gqa=grouped)
    return out[..., :wide]


def _runs_eagerly(query: Tensor) -> bool:
    """Returns whether FlexAttention is called uncompiled: on a CPU, and where the caller is being compiled."""
    return query.device.type == "cpu" or torch.compiler.is_compiling()


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """Suspends modes of torch functions, such as ZeRO's, which watches the parameters of a step.

    torch (2.11) traces them with FlexAttention, and fails; later releases do not. It has no public name for this.
    """
    with contextlib.ExitStack() as suspended:
        while torch._C._len_torch_function_stack():
            suspended.enter_context(torch.overrides._pop_mode_temporarily())
        yield


def _widen(tensor: Tensor) -> Tensor:
    """Returns a tensor padded with zeros to the least width of a head; scores and outputs stay."""
    narrow = NARROWEST - tensor.shape[-1]
    return F.pad(tensor, (0, narrow)) if narrow > 0 else tensor


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
