"""Computes attention of packed documents without a dense mask, behind transformers' attention interface.

transformers keeps packed documents apart with a mask `[B, 1, L, L]`: no flash kernel takes it, no block is skipped,
keys and values are repeated, and the host waits for the device to detect documents. Here the attention modules get the
starts of the documents (see :mod:`dlo_tasks.language.batches`), for one of two kernels:

* `varlen`: :func:`torch.nn.attention.varlen.varlen_attn`, FlashAttention-2 (Dao, 2023, arXiv 2307.08691) on the
  concatenated tokens of all rows; half precision. On a CPU, in any precision, :func:`varlen_reference` replaces it.
* `flex`: FlexAttention (Dong et al., 2024, arXiv 2412.05496), compiled, with a block mask that is computed from the
  documents block by block; float32, and heads that are wider than the first one takes.

Neither has dropout of attention weights (torch 2.11 to 2.15): then, and where a model brings a mask of its own, it is
`sdpa`.

Shapes: B rows, L positions, T = B * L tokens, H heads of queries, K of keys and values, D and E their widths.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.varlen import varlen_attn

from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensor
from dlo_framework.models.attention.masked_attention import run_flex
from dlo_framework.models.autocast import autocast_dtype
from dlo_framework.models.hugging_face import is_bidirectional
from dlo_tasks.language.batches import count_documents, mark_document_starts
from dlo_tasks.language.text_settings import text_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Name of this implementation in transformers. It must not contain "sdpa" or "flash", which transformers matches.
NAME = "dlo_varlen"
#: Positions per block of FlexAttention's masks.
BLOCK = 128
#: Maximum head width of FlashAttention-2, the divisor of its head widths, and its minimum compute capability.
_WIDEST, _MULTIPLE, _AMPERE = 256, 8, (8, 0)
_HALVES = (torch.bfloat16, torch.float16)
#: Config names of attention dropout and of head widths, in various families.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
_WIDTHS = ("head_dim", "global_head_dim", "v_head_dim", "qk_head_dim")
#: Whether torch's kernel supports grouped heads itself (from 2.12).
_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters

Kernel = Literal["varlen", "flex"]


def register_attention() -> None:
    """Registers the implementation in transformers, with the masks of `sdpa`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def is_packed_attention(model: PreTrainedModel) -> bool:
    """Returns whether a model uses this implementation."""
    return bool(model.config._attn_implementation == NAME)


def is_supported(config: Any, device: torch.device) -> bool:
    """Returns whether a model with this config uses this implementation by default on a device.

    Args:
        config: Text model's config.
        device: Device of the run.
    """
    if device.type != "cuda" or torch.version.cuda is None or has_dropout(config):
        return False
    settings = text_settings(config)
    return not settings.attention_chunk_size and {*settings.layer_types} <= {"full_attention", "sliding_attention"}


def choose_kernel(config: Any, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Returns the kernel for packed documents; None where only a dense mask works.

    Args:
        config: Text model's config.
        dtype: Precision in which attention is computed.
        device: Device of the batch.
    """
    if has_dropout(config):
        return None
    softcap = text_settings(config).attn_logit_softcapping
    if device.type != "cuda":
        return None if softcap else "varlen"
    fits = dtype in _HALVES and torch.cuda.get_device_capability(device) >= _AMPERE
    if fits and not softcap and _widest_head(config) <= _WIDEST:
        return "varlen"
    return "flex" if dtype in (*_HALVES, torch.float32) else None


def attention_arguments(model: PreTrainedModel, position_ids: Tensor) -> dict[str, Any]:
    """Returns keyword arguments that pass the documents of rows to a model's attention, and prevent a dense mask.

    transformers (5.17 to 5.23: `_preprocess_mask_arguments`) does not change an attention mask of four dims, such as
    FlexAttention's or an empty one.

    Args:
        model: Model with this implementation.
        position_ids: Positions, `[B, L]`; a document begins with each row, and wherever they do not increase by one.
    """
    if isinstance(position_ids, FakeTensor):  # No values, as in FLOP counting or shape checks.
        return {}
    config: Any = model.config.get_text_config(decoder=True)
    kernel = choose_kernel(config, dtype_of(model, position_ids.device), position_ids.device)
    if kernel is None:
        return {}
    rows, length = position_ids.shape
    settings = text_settings(config)
    window = settings.sliding_window
    is_cut = isinstance(window, int) and window < length
    number, longest, _ = count_documents(position_ids)
    no_mask = position_ids.new_empty((0, 0, 0, 0))
    if number == rows and not is_cut and not settings.attn_logit_softcapping:
        return {"attention_mask": no_mask}  # One document per row: causal attention suffices.
    if kernel == "flex":
        kinds = set(settings.layer_types) or {"sliding_attention"}
        windows = {"full_attention": None, "sliding_attention": window if is_cut else None}
        if not is_cut or len(kinds) == 1:  # One mask for all layers.
            return {"attention_mask": block_mask(position_ids, windows.get(min(kinds)))}
        return {"attention_mask": {kind: block_mask(position_ids, windows[kind]) for kind in windows}}
    return {"attention_mask": no_mask, **document_lengths(position_ids, number, longest)}


def document_lengths(position_ids: Tensor, number: int, longest: int) -> dict[str, Any]:
    """Returns keyword arguments with the document boundaries of packed rows, for kernels that take no mask.

    Args:
        position_ids: Positions, `[B, L]`.
        number: Number of documents; see :func:`dlo_tasks.language.batches.count_documents`.
        longest: Tokens of the longest document.
    """
    places = torch.nonzero_static(mark_document_starts(position_ids).flatten(), size=number).flatten()
    edges = F.pad(places, (0, 1), value=position_ids.numel()).to(torch.int32)
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention, with the signature of transformers' attention functions.

    Args:
        module: Attention module.
        query: Queries, `[B, H, L, D]`.
        key: Keys, `[B, K, L, D]`.
        value: Values, `[B, K, L, E]`.
        attention_mask: Mask from :func:`attention_arguments`, or a mask for `sdpa`.
        dropout: Dropout rate of attention weights.
        scaling: Factor of scores; the width's inverse square root by default.
        sliding_window: Number of tokens that a token attends to, itself included; None for all before it.
        softcap: Soft bound of scores.
        cu_seq_lens_q: Starts of the documents among all tokens, int32, and the end.
        max_length_q: Tokens of the longest document.
        **others: Further arguments of some families.

    Returns:
        Output, `[B, L, H, E]`, and None for the attention weights.

    Raises:
        DloError: If these kernels do not support an argument.
    """
    by_lengths, by_blocks = cu_seq_lens_q is not None, isinstance(attention_mask, BlockMask)
    if by_lengths or by_blocks:
        _refuse(module, dropout, None if by_blocks else softcap, others)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        dtype = autocast_dtype(value.device.type) or value.dtype
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if by_blocks:
            return _by_blocks(query, key, value, attention_mask, scale, softcap), None
        assert cu_seq_lens_q is not None
        assert max_length_q is not None
        return _by_lengths(query, key, value, cu_seq_lens_q, max_length_q, scale, sliding_window), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(attention_mask, Tensor) and attention_mask.numel() == 0:
        attention_mask = None
    if softcap is not None:
        return _by_scores(
            query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap
        ), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)


def _by_scores(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Returns attention with soft-capped scores, `[B, L, H, E]`, which `sdpa` does not compute.

    Args:
        query: Queries, `[B, H, L, D]`.
        key: Keys, `[B, K, T, D]`.
        value: Values, `[B, K, T, E]`.
        mask: Mask for `sdpa`; None for causal attention of the last L of T tokens.
        scale: Factor of scores.
        softcap: Soft bound of scores.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap))
    if mask is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        mask = seen.tril(scores.shape[-1] - scores.shape[-2])
    mask = mask[..., : scores.shape[-1]]
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


def varlen_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Computes :func:`torch.nn.attention.varlen.varlen_attn` document by document, on any device.

    Args:
        query: Queries, `[T, H, D]`.
        key: Keys, `[T, K, D]`.
        value: Values, `[T, K, D]`.
        cu_seq_q: Starts of the documents, and the end.
        cu_seq_k: Starts of the documents in the keys; equal to `cu_seq_q` here.
        max_q: Tokens of the longest document.
        max_k: Tokens of the longest document in the keys.
        scale: Factor of scores.
        window_size: Number of tokens that a token attends to on its left and right, without itself; -1 for all.
        enable_gqa: Whether keys have fewer heads than queries.
    """
    left, right = window_size
    assert right == 0  # causal
    outputs = []
    for first, past in pairwise(cu_seq_q.tolist()):
        q, k, v = (tensor[first:past].transpose(0, 1)[None] for tensor in (query, key, value))
        seen = None
        if 0 <= left < past - first - 1:
            places = torch.arange(past - first, device=query.device)
            behind = places[:, None] - places[None]
            seen = (behind >= 0) & (behind <= left)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def block_mask(position_ids: Tensor, window: int | None = None, block: int = BLOCK) -> BlockMask:
    """Returns FlexAttention's mask of packed documents, without a dense mask and without waiting for the device.

    The first visible key of a query never decreases along a row, so the visible blocks of a block of queries follow
    from its first and its last query.

    Args:
        position_ids: Positions, `[B, L]`.
        window: Number of tokens that a token attends to, itself included; None for all before it.
        block: Positions per block.
    """
    length = position_ids.shape[1]
    places = torch.arange(length, device=position_ids.device)
    first = torch.where(mark_document_starts(position_ids), places, 0).cummax(dim=1).values
    if window is not None:
        first = torch.maximum(first, places - window + 1)
    count = -(-length // block)
    number = torch.arange(count, device=position_ids.device)
    lowest = first[:, ::block] // block  # [B, blocks], first block with a visible key
    lasts = (number * block + block - 1).clamp(max=length - 1)
    all_from = -(-first.index_select(1, lasts) // block)  # first block that is fully visible to all queries
    queries, keys = number[None, :, None], number[None, None]
    seen = (keys <= queries) & (keys >= lowest[..., None])
    wholly = (keys < queries) & (keys >= all_from[..., None])

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (k >= first[b, q])

    partly, whole = _in_order(seen & ~wholly), _in_order(wholly)
    return BlockMask.from_kv_blocks(
        *partly, *whole, BLOCK_SIZE=block, mask_mod=sees, seq_lengths=(length, length)
    )  # fmt: skip


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of key blocks per query block, `[B, 1, n]`, and their indices, `[B, 1, n, n]`."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]


def _by_lengths(
    query: Tensor, key: Tensor, value: Tensor, edges: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    rows, heads, length, _ = query.shape
    wide = value.shape[-1]
    on_gpu = query.device.type == "cuda"
    width = -(-max(query.shape[-1], wide) // _MULTIPLE) * _MULTIPLE if on_gpu else max(query.shape[-1], wide)
    if not _GROUPS:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    grouped = {"enable_gqa": key.shape[1] != heads} if _GROUPS else {}
    packed = [_in_a_row(tensor, width) for tensor in (query, key, value)]
    compute: Any = varlen_attn if on_gpu else varlen_reference
    left = -1 if window is None else window - 1
    out = compute(*packed, edges, edges, longest, longest, scale=scale, window_size=(left, 0), **grouped)
    return out.view(rows, length, heads, width)[..., :wide]


def _in_a_row(tensor: Tensor, width: int) -> Tensor:
    """Returns `[T, heads, width]` of `[B, heads, L, D]`, zero-padded to `width`."""
    narrow = width - tensor.shape[-1]
    tensor = F.pad(tensor, (0, narrow)) if narrow else tensor
    return tensor.transpose(1, 2).reshape(-1, tensor.shape[1], width)


def _by_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, softcap: float | None
) -> Tensor:
    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    out = run_flex(query, key, value, mask, scale, None if softcap is None else capped)
    return out.transpose(1, 2).contiguous()


def _refuse(module: nn.Module, dropout: float, softcap: float | None, others: dict[str, Any]) -> None:
    what = None
    if dropout:
        what = f"without dropout of its weights, got {dropout}"
    elif softcap is not None:
        what = f"without a soft-cap, got {softcap}"
    elif others.get("s_aux") is not None:
        what = "without sinks"
    elif others.get("position_bias") is not None:
        what = "without a bias of positions"
    elif is_bidirectional(module, **others):
        what = "causal"
    if what is not None:
        raise DloError(f"attention: {NAME} must be {what} in {type(module).__name__}; set attention: sdpa, or eager")


def has_dropout(config: Any) -> bool:
    """Returns whether a text model's config has dropout of attention weights."""
    return any(getattr(config, name, None) for name in _DROPOUTS)


def _widest_head(config: Any) -> int:
    settings = text_settings(config)
    sizes = [getattr(config, name, None) for name in _WIDTHS]
    width = settings.hidden_size // (settings.num_attention_heads or 1)
    return max([width, *(size for size in sizes if isinstance(size, int))])


def dtype_of(model: nn.Module, device: torch.device) -> torch.dtype:
    """Returns the precision in which a model computes on a device."""
    return autocast_dtype(device.type) or next(model.parameters()).dtype
