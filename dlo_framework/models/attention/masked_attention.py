"""Attention under a mask by a kernel of choice, by gathered blocks, and under a dense mask for a cache of keys.

Gathered blocks: each block of queries attends to a copy of the key blocks that it sees. The copies of a group of rows
go through one batched ``scaled_dot_product_attention`` with a mask of positions. Time and memory are O(L w) for L
positions that see w keys each. Nothing is compiled, so that it runs on any device.

FlexAttention, compiled on an accelerator: A Programming Model for Generating Optimized Attention Kernels. Dong et al.,
2024, arXiv 2412.05496. Its C++ kernel for CPUs has no backward (torch 2.14), so that gathered blocks train there.

Shapes: B rows, H heads of queries, K heads of keys and values, L positions, D and E widths, N blocks of b positions, R
block rows of a group that see C blocks each, h layouts (1 or H).

Scores may be more than products of queries and keys: soft caps, sinks and biases of positions. Gemma 2: Improving Open
Language Models at a Practical Size. Gemma Team, 2024, arXiv 2408.00118 (soft caps). Efficient Streaming Language Models
with Attention Sinks. Xiao et al., 2023, arXiv 2309.17453; as in gpt_oss, a sink is one more learned score of each head,
to which no value belongs.

Fused kernels compute neither soft caps nor sinks, so that the scores are in memory: for the gathered blocks O(L w) of
them. A bias of positions is a dense matrix itself, to which the mask is added.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes

from dlo_framework.costs import OperatorCounter
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensor
from dlo_framework.models.attention.attention_mask import AttentionMask, BlockRows, BlockTable, LocalHeads

#: Positions per block of FlexAttention; its kernels need multiples of 128.
BLOCK = 128
#: Least width of heads of its CUDA kernels (torch 2.11 to 2.15); narrower ones are padded with zeros.
NARROWEST = 16


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
        attended: Any = flex_attention(query, key, value, score_mod, blocks, scale, enable_gqa=grouped)
        return attended
    # Zeros after a narrow head's features leave scores and outputs as they are.
    padded = (_pad(one, 0, max(0, NARROWEST - one.shape[-1])) for one in (query, key, value))
    with _no_modes():
        out: Tensor = _compiled()(*padded, score_mod, blocks, scale, enable_gqa=grouped)[..., :wide]
    if OperatorCounter.current is not None:
        _count(OperatorCounter.current, out, query.shape[-1], blocks)
    return out


def _runs_eagerly(query: Tensor) -> bool:
    """Returns whether FlexAttention is called uncompiled: on a CPU, and where the caller is being compiled."""
    return query.device.type == "cpu" or torch.compiler.is_compiling()


@contextlib.contextmanager
def _no_modes() -> Iterator[None]:
    """Suspends modes: of functions, such as ZeRO's, and of operators, such as a counter of FLOPs.

    torch (2.11) traces the former with FlexAttention, and fails; later releases do not. Under the latter torch (2.11 to
    2.15) compiles nothing: all scores would be in memory. It has no public names for this.
    """
    with contextlib.ExitStack() as suspended:
        while torch._C._len_torch_function_stack():
            suspended.enter_context(torch.overrides._pop_mode_temporarily())
        suspended.enter_context(_disable_current_modes())
        yield


def _count(counter: OperatorCounter, out: Tensor, width: int, blocks: BlockMask) -> None:
    """Adds the FLOPs of the blocks that FlexAttention computes, in backward too, which computes the scores again."""
    numbers = [one for one in (blocks.kv_num_blocks, blocks.full_kv_num_blocks) if one is not None]
    shared = out.shape[0] * out.shape[1] // numbers[0].shape[:2].numel()  # Rows and heads with the same layout.
    scores = 2 * BLOCK**2 * shared * sum(int(number.sum()) for number in numbers)
    counter.add(flex_attention, scores * (width + out.shape[-1]))
    if out.requires_grad:
        out.register_hook(lambda grad: counter.add(flex_attention, scores * (3 * width + 2 * out.shape[-1])))


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
        visible = table[0 if single else h, q // size, k // size] & mask._rules(q, k)
        return visible if documents is None else visible & (documents[b, q] == documents[b, k])

    lengths = (length, length)
    return BlockMask.from_kv_blocks(counts[None], order[None], BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)


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


@dataclass(frozen=True)
class Scores:
    """Soft cap, sinks and biases of scores.

    Attributes:
        softcap: Soft bound: a score s becomes `softcap * tanh(s / softcap)`; None for none.
        sinks: Score of each head's sink, `[H]`; None without sinks.
        bias: Summand of scores without soft cap and sinks, which broadcasts to `[B, H, q, k]`; None for none.
    """

    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is none of them."""
        return self.softcap is None and self.sinks is None and self.bias is None

    def repeated(self, times: int) -> Scores:
        """Returns the same for several rows of heads in one dim."""
        return self if self.sinks is None else Scores(self.softcap, self.sinks.repeat(times))


#: Products and nothing else.
PLAIN_SCORES = Scores()


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    scores: Scores = PLAIN_SCORES,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Returns attention under a dense mask, `[B, H, q, E]`.

    Args:
        query: Queries, `[B, H, q, D]`.
        key: Keys, `[B, H, k, D]`.
        value: Values, `[B, H, k, E]`.
        seen: Mask, bool, that broadcasts to `[B, H, q, k]`; each query sees a key. None for all.
        scores: Soft cap and sinks of the scores, or their bias.
        scale: Factor of scores; the width's inverse square root by default.
        dropout: Dropout rate of attention weights.
    """
    if scores.bias is not None:
        bias = scores.bias.to(query.dtype)
        seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
    if scores.softcap is None and scores.sinks is None:
        return F.scaled_dot_product_attention(query, key, value, seen, dropout_p=dropout, scale=scale)
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = (query @ key.transpose(-1, -2)).to(wide) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    if scores.sinks is not None:
        logits = torch.cat([logits, scores.sinks.to(wide)[:, None, None].expand(*logits.shape[:-1], 1)], -1)
    weights = logits.softmax(-1)
    if scores.sinks is not None:
        weights = weights[..., :-1]
    return F.dropout(weights, dropout).to(value.dtype) @ value


_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def masked_attention(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    documents: Tensor | None = None,
    *,
    heads: LocalHeads | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Returns attention under a mask, `[B, H, L, E]`.

    Args:
        kernel: Kernel, from :func:`~.attention_options.choose_kernel`.
        query: Queries, `[B, H, L, D]`.
        key: Keys, `[B, K, L, D]`; each head serves H / K consecutive heads of queries.
        value: Values, `[B, K, L, E]`.
        mask: Mask.
        documents: Number of the document of each position, int64 `[B, L]`; None for one document per row.
        heads: Heads of queries in these tensors; None for all of the model's.
        scale: Factor of scores; the width's inverse square root by default.
        dropout: Dropout rate of attention weights.
        scores: Soft cap and sinks of the scores, which `blocks` and `sdpa` compute.

    Raises:
        DloError: If the kernel keeps no documents apart.
    """
    has_values = not (query.is_meta or isinstance(query, FakeTensor))
    if kernel == "blocks" or (kernel == "flex" and not has_values):
        return attend_blocks(
            query, key, value, mask, documents, heads=heads, scale=scale, dropout=dropout, scores=scores
        )
    if kernel == "flex":
        blocks = flex_mask(mask, query.shape[2], heads, documents, query.device)
        return run_flex(query, key, value, blocks, query.shape[-1] ** -0.5 if scale is None else scale)
    if documents is not None and kernel in _BACKENDS:
        raise DloError(
            f"attention.kernel must keep packed documents apart, got {kernel}, which takes no mask; set kernel: varlen"
        )
    key, value, seen = _for_heads(query, key), _for_heads(query, value), None
    if documents is not None or not mask.pattern.is_dense or not scores.is_plain:
        places = torch.arange(query.shape[2], device=query.device)
        seen = mask.visible(places, places, heads, query.shape[2])[None]
        if documents is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    causal = mask.causal and seen is None
    if kernel in _BACKENDS:
        with sdpa_kernel([_BACKENDS[kernel]]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, dropout_p=dropout, scale=scale)
    if causal:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout, scale=scale)
    return scored_attention(query, key, value, seen, scores, scale=scale, dropout=dropout)


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    seen: Tensor | None,
    *,
    heads: LocalHeads | None = None,
    scale: float | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Returns attention of the last positions to all keys of a cache, `[B, H, q, E]`, under a dense mask.

    Args:
        query: Queries of the last positions, `[B, H, q, D]`.
        key: Keys, `[B, K, k, D]`.
        value: Values, `[B, K, k, E]`.
        mask: Mask.
        seen: Causal mask with the padding, bool `[B, 1, q, k]`; None without padding. Padding is on the left, and the
            pattern begins after it.
        heads: Heads of queries in these tensors; None for all of the model's.
        scale: Factor of scores.
        scores: Soft cap and sinks of the scores.
    """
    queries, keys = query.shape[2], key.shape[2]
    places = torch.arange(keys, device=query.device)
    last = places[keys - queries :]
    if seen is None:
        allowed = mask.visible(last, places, heads, keys)[None]
    else:
        made = []
        for first in seen[:, 0, -1, :keys].to(torch.int8).argmax(-1).tolist():  # Number of positions of padding
            inside = (places - first).clamp(min=0)
            visible = mask.visible(inside[keys - queries :], inside, heads, keys - first)
            # A position of the padding sees itself: its output is not used.
            visible = (visible & (places >= first)) | (last[:, None] == places)
            made.append(visible.expand(query.shape[1], -1, -1))
        allowed = torch.stack(made)
    key, value = _for_heads(query, key), _for_heads(query, value)
    return scored_attention(query, key, value, allowed, scores, scale=scale)


def _pad(tensor: Tensor, *sizes: int) -> Tensor:
    """Returns a tensor with zeros around it, as :func:`F.pad`; itself, and no copy, where there are none."""
    return F.pad(tensor, sizes) if any(sizes) else tensor


def _for_heads(query: Tensor, keys: Tensor) -> Tensor:
    """Returns keys or values, `[B, K, ...]`, repeated for the heads of queries, `[B, H, ...]`, that each serves."""
    times = query.shape[1] // keys.shape[1]
    return keys if times == 1 else keys.repeat_interleave(times, 1)


@torch.compiler.disable
def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    documents: Tensor | None = None,
    *,
    heads: LocalHeads | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Returns attention under a mask, `[B, H, L, E]`, in memory `[B, L, H, E]`.

    Args:
        query: Queries, `[B, H, L, D]`.
        key: Keys, `[B, K, L, D]`; each head serves H / K consecutive heads of queries.
        value: Values, `[B, K, L, E]`.
        mask: Mask.
        documents: Number of the document of each position, int64 `[B, L]`; positions see those of their document only.
            None for one document per row.
        heads: Heads of queries in these tensors; None for all of the model's.
        scale: Factor of scores; the width's inverse square root by default.
        dropout: Dropout rate of attention weights.
        scores: Soft cap and sinks of the scores.

    torch.compile does not trace it, because the tables are made by Python: it breaks the graph around it.
    """
    length, size = query.shape[2], mask.pattern.block
    table = _table_for(query, mask, length, heads)
    layouts = table.groups[0].columns.shape[0]
    if layouts > 1:
        key, value = _for_heads(query, key), _for_heads(query, value)
    padded = (_pad(one, 0, 0, 0, -length % size) for one in (query, key, value))
    query, key, value = (one.unflatten(2, (-1, size)) for one in padded)  # [B, heads, N, b, D], zeros at the end
    numbers = None
    if documents is not None:
        numbers = F.pad(documents, (0, -length % size), value=-2).unflatten(1, (-1, size))
    outputs = [_attend_rows(query, key, value, rows, numbers, scale, dropout, scores) for rows in table.groups]
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]  # [rows, B, H, b, E]
    out = out.index_select(0, table.order).permute(1, 0, 3, 2, 4)  # [B, N, b, H, E]
    return out.flatten(1, 2)[:, :length].transpose(1, 2)


def _table_for(query: Tensor, mask: AttentionMask, length: int, heads: LocalHeads | None) -> BlockTable:
    table = mask.table(length, heads, query.device)
    if isinstance(query, FakeTensor):
        fake = query.fake_mode.from_tensor
        groups = tuple(BlockRows(*(fake(tensor) for tensor in group)) for group in table.groups)
        return BlockTable(groups, fake(table.order))
    return table


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: BlockRows,
    documents: Tensor | None,
    scale: float | None,
    dropout: float,
    scores: Scores,
) -> Tensor:
    """Returns the output of a group of block rows, `[R, B, H, b, E]`."""
    rows, heads = query.shape[0], query.shape[1]
    q = query.index_select(2, group.rows).permute(2, 0, 1, 3, 4)  # [R, B, H, b, D]
    k, v = _gather(key, group.columns), _gather(value, group.columns)  # [R, B, K, C * b, D]
    seen = group.seen.transpose(0, 1)  # [R, h, b, C * b]
    if documents is not None:
        seen = _within_documents(seen, documents, group)
    layouts = seen.shape[-3]
    if documents is None and (rows == 1 or layouts == 1):
        q, k, v = (tensor.flatten(1, 2) for tensor in (q, k, v))  # rows and heads in one dim: the mask broadcasts
        scores = scores.repeated(rows)
    else:
        seen = seen[:, None] if documents is None else seen  # [R, 1 or B, h, b, C * b]
        seen = seen.expand(-1, rows, -1, -1, -1).flatten(0, 1)
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out = scored_attention(q, _for_heads(q, k), _for_heads(q, v), seen, scores, scale=scale, dropout=dropout)
    return out.reshape(len(group.rows), rows, heads, *out.shape[-2:])


def _gather(blocks: Tensor, columns: Tensor) -> Tensor:
    """Returns the key blocks of each row, `[R, B, K, C * b, D]`, of `[B, K, N, b, D]`."""
    layouts, rows, _ = columns.shape
    if layouts == 1:
        gathered = blocks.index_select(2, columns.flatten()).unflatten(2, (rows, -1))  # [B, K, R, C, b, D]
    else:  # A layout per head
        number = torch.arange(layouts, device=columns.device)[:, None]
        gathered = blocks[:, number, columns.flatten(1)].unflatten(2, (rows, -1))
    return gathered.flatten(3, 4).permute(2, 0, 1, 3, 4)


def _within_documents(seen: Tensor, documents: Tensor, group: BlockRows) -> Tensor:
    """Returns the mask of positions of one document, `[R, B, h, b, C * b]`, of `[R, h, b, C * b]`."""
    ours = documents.index_select(1, group.rows).transpose(0, 1)[:, :, None, :, None]  # [R, B, 1, b, 1]
    theirs = documents[:, group.columns]  # [B, h, R, C, b]
    theirs = theirs.flatten(3, 4).permute(2, 0, 1, 3)[:, :, :, None]  # [R, B, h, 1, C * b]
    same = (ours == theirs) | (ours == -2)  # Padding after the last position: any key will do.
    return seen[:, None] & same
