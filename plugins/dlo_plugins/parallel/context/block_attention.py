"""Attention in blocks of queries and keys, whose outputs are merged by their log-sum-exps.

Blockwise Parallel Transformer. Liu & Abbeel, 2023, arXiv 2305.19370; the merge is that of FlashAttention (Dao et al.,
2022, arXiv 2205.14135). Pairs of chunks in which no query sees a key are skipped: the causal order, windows and packed
documents save this work.

One of torch's fused kernels computes it if one fits. `scaled_dot_product_attention` chooses among them but does not
return the log-sum-exp, so they are called by name (torch 2.11 to 2.15), as torch's own experimental ring attention does
(`torch.distributed.tensor.experimental`). Otherwise (soft-capped scores, dropout, values of another width than keys,
other devices) a kernel written in torch computes the same, some queries at a time. Backward gets the output and the
log-sum-exp, merged over all blocks, and returns this block's contribution to the gradients (FlashAttention-2, Dao,
2023, arXiv 2307.08691, algorithm 2).

Shapes: B rows, H heads of queries, K heads of keys and values, S queries, T keys, D and E widths of keys and values.
Tensors of :func:`attend` contain several chunks of S positions one after another,
[B, H, chunks * S, D]. Results of fused kernels for queries that see no key are undefined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_plugins.parallel.context import block_attention
from dlo_plugins.parallel.context.sequence_layout import Documents, PairMask, Visibility

_HALVES = (torch.bfloat16, torch.float16)
#: Compute capabilities from which FlashAttention-2 runs, and from which cuDNN's attention is the faster of the two.
_AMPERE, _HOPPER = (8, 0), (9, 0)
#: Number of queries to a multiple of which the memory-efficient kernel pads its log-sum-exp.
_LSE_BLOCK = 32

_aten = torch.ops.aten


@dataclass(frozen=True)
class Score:
    """Score function of a query and a key.

    Attributes:
        scale: Factor on their product.
        softcap: Soft bound, `softcap * tanh(score / softcap)` (Gemma 2); None for no bound.
    """

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights, the same in forward and backward.

    Attributes:
        rate: Rate of dropped weights; the others are divided by `1 - rate`.
        seed: Seed of the random numbers.
    """

    rate: float
    seed: int

    def generator(self, device: torch.device) -> torch.Generator:
        """Returns a new generator for a block's random numbers."""
        return torch.Generator(device).manual_seed(self.seed)

    def factors(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Returns the factors on some weights, 0 or `1 / (1 - rate)`."""
        drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
        return (drawn >= self.rate).to(weights.dtype) / (1 - self.rate)


class Block(NamedTuple):
    """Block of attention: some queries and the keys that they see.

    Attributes:
        q: Queries, [B, H, S, D].
        k: Keys, [B, H, T, D]; [B, K, T, D] for a kernel that groups heads.
        v: Values, [B, H, T, E]; [B, K, T, E] for a kernel that groups heads.
        score: Score function.
        causal: Whether a query sees only the keys of its own number and before; S = T then.
        mask: Mask `[B or 1, 1, S, T]` of the keys that are seen; None for all keys, or for the causal mask alone.
        dropout: Dropout of this block's weights, which no kernel of this table computes; None without dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    score: Score
    causal: bool = False
    mask: PairMask | None = None
    dropout: Dropout | None = None

    @property
    def lengths(self) -> tuple[None, None, int, int]:
        """Lengths that kernels take: None for cumulative ones, as all rows have one length; queries; keys."""
        return None, None, self.q.shape[2], self.k.shape[2]

    def bias(self, heads: bool = False) -> Tensor | None:
        """Returns the mask as a bias of the scores, one for all heads or expanded to each; None without a mask."""
        if self.mask is None:
            return None
        bias = self.mask.bias(self.q.dtype)
        return bias.expand(*self.q.shape[:2], -1, -1) if heads else bias


class Result(NamedTuple):
    """Tensors that backward needs besides a block.

    Attributes:
        grad: Gradient of the output, [B, H, S, E].
        out: Output, merged over all blocks, [B, H, S, E].
        lse: Log-sum-exp, merged over all blocks, [B, H, S].
    """

    grad: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Kernel:
    """Kernel that computes the attention of a block.

    Attributes:
        name: Name of the kernel.
        fits: Function that returns whether the kernel computes a block, from queries, values and whether it is masked.
        forward: Function that returns the output and the log-sum-exp; further results are ignored.
        backward: Function that returns the gradients of q, k and v; further results are ignored.
        groups: Whether the kernel itself shares heads of keys among heads of queries.
    """

    name: str
    fits: Callable[[Tensor, Tensor, bool], bool]
    forward: Callable[[Block], Any]
    backward: Callable[[Block, Result], Any]
    groups: bool = False


def _fits_cpu(q: Tensor, v: Tensor, masked: bool) -> bool:
    return q.device.type == "cpu" and q.is_floating_point() and q.shape[-1] == v.shape[-1]


def _cpu_forward(b: Block) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        b.q, b.k, b.v, 0.0, b.causal, attn_mask=b.bias(), scale=b.score.scale
    )


def _cpu_backward(b: Block, r: Result) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        r.grad, b.q, b.k, b.v, r.out, r.lse, 0.0, b.causal, attn_mask=b.bias(), scale=b.score.scale
    )


def _fits_flash(q: Tensor, v: Tensor, masked: bool) -> bool:
    width = q.shape[-1]
    wide = width == v.shape[-1] and width <= 256 and width % 8 == 0
    if q.device.type != "cuda" or q.dtype not in _HALVES or not wide or masked:
        return False
    return torch.cuda.get_device_capability(q.device) >= _AMPERE


def _flash_forward(b: Block) -> Any:
    return _aten._scaled_dot_product_flash_attention(b.q, b.k, b.v, 0.0, b.causal, False, scale=b.score.scale)


def _flash_backward(b: Block, r: Result) -> Any:
    # The random state is not read without dropout.
    state = (torch.empty(size, dtype=torch.uint64, device=b.q.device) for size in (2, 0))
    return _aten._scaled_dot_product_flash_attention_backward(
        r.grad, b.q, b.k, b.v, r.out, r.lse.contiguous(), *b.lengths, 0.0, b.causal, *state, scale=b.score.scale
    )


def _fits_cudnn(q: Tensor, v: Tensor, masked: bool) -> bool:
    """Returns whether torch would use cuDNN for such a block, and cuDNN is the fastest."""
    if q.device.type != "cuda" or q.dtype not in _HALVES or masked or q.shape[-1] != v.shape[-1]:
        return False
    if torch.cuda.get_device_capability(q.device) < _HOPPER or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    block = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
    return torch.backends.cuda.can_use_cudnn_attention(block)


def _cudnn_forward(b: Block) -> Any:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        b.q, b.k, b.v, None, True, 0.0, b.causal, False, scale=b.score.scale
    )
    return out, lse.squeeze(-1) if lse.ndim == b.q.ndim else lse  # It may be [B, H, S, 1].


def _cudnn_backward(b: Block, r: Result) -> Any:
    saved = b.q, b.k, b.v, r.out, r.lse.contiguous()[..., None], *_no_random_state(b.q)
    return _aten._scaled_dot_product_cudnn_attention_backward(
        r.grad, *saved, None, *b.lengths, 0.0, b.causal, scale=b.score.scale
    )


def _fits_efficient(q: Tensor, v: Tensor, masked: bool) -> bool:
    aligned = all(width % (8 if q.dtype in _HALVES else 4) == 0 for width in (q.shape[-1], v.shape[-1]))
    return q.device.type == "cuda" and q.dtype in (*_HALVES, torch.float32) and aligned


def _efficient_forward(b: Block) -> Any:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        b.q, b.k, b.v, b.bias(heads=True), True, 0.0, b.causal, scale=b.score.scale
    )
    return out, lse[:, :, : b.q.shape[2]]


def _efficient_backward(b: Block, r: Result) -> Any:
    # Padded with infinity, as by the kernel's own forward, so that positions after the last query have no weight.
    lse = F.pad(r.lse, (0, -r.lse.shape[-1] % _LSE_BLOCK), value=math.inf).contiguous()
    # The kernel reads the output in the strides of its own forward's, [B, S, H, E], whatever those of the tensor are.
    out = r.out.transpose(1, 2).contiguous().transpose(1, 2)
    saved = b.q, b.k, b.v, b.bias(heads=True), out, lse, *_no_random_state(b.q)
    needed = [True, True, True, False]
    return _aten._scaled_dot_product_efficient_attention_backward(
        r.grad, *saved, 0.0, needed, b.causal, scale=b.score.scale
    )


def _no_random_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a seed and an offset, which are not read without dropout."""
    return torch.zeros((), dtype=torch.long, device=q.device), torch.zeros((), dtype=torch.long, device=q.device)


#: FlashAttention on a CPU: also masks.
CPU_FLASH = Kernel("CpuFlash", _fits_cpu, _cpu_forward, _cpu_backward)
#: cuDNN's attention: half precisions, no masks.
CUDA_CUDNN = Kernel("CudaCudnn", _fits_cudnn, _cudnn_forward, _cudnn_backward)
#: FlashAttention-2 on CUDA: half precisions, no masks.
CUDA_FLASH = Kernel("CudaFlash", _fits_flash, _flash_forward, _flash_backward, groups=True)
#: Memory-efficient attention on CUDA (Rabe & Staats, 2021, arXiv 2112.05682): also float32, and masks.
CUDA_EFFICIENT = Kernel("CudaEfficient", _fits_efficient, _efficient_forward, _efficient_backward)
#: All kernels, the fastest first.
KERNELS = (CPU_FLASH, CUDA_CUDNN, CUDA_FLASH, CUDA_EFFICIENT)


def kernel_for(q: Tensor, v: Tensor, masked: bool) -> Kernel | None:
    """Returns the fastest kernel for a block; None if there is none."""
    return next((kernel for kernel in KERNELS if kernel.fits(q, v, masked)), None)


#: Largest number of scores that the torch kernel keeps at a time.
_SCORES = 2**24


def forward(block: Block) -> tuple[Tensor, Tensor]:
    """Returns a block's output [B, H, S, E], and the log of the sum of its exponentials [B, H, S].

    A query that sees no key gets zeros, and minus infinity.

    Args:
        block: Block, with K heads of keys and values; each serves H / K consecutive heads of queries.
    """
    kernel = _kernel(block)
    out, lse, *_ = (_torch_forward if kernel is None else kernel.forward)(_with_heads(block, kernel))
    if block.mask is not None:
        out, lse = out.masked_fill(block.mask.blind[..., None], 0.0), lse.masked_fill(block.mask.blind, -math.inf)
    return out, lse


def backward(block: Block, result: Result) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a block's contribution to the gradients of q, k and v, in their shapes.

    Args:
        block: Block of the forward.
        result: Gradient of the output, with the output and the log-sum-exp, merged over all blocks.
    """
    heads, kernel = block.k.shape[1], _kernel(block)
    dq, dk, dv, *_ = (_torch_backward if kernel is None else kernel.backward)(_with_heads(block, kernel), result)
    return dq, _summed(dk, heads), _summed(dv, heads)


def _kernel(block: Block) -> Kernel | None:
    plain = block.score.softcap is None and block.dropout is None
    return kernel_for(block.q, block.v, block.mask is not None) if plain else None


def _with_heads(block: Block, kernel: Kernel | None) -> Block:
    """Repeats heads of keys and values for the heads of queries that use them, unless the kernel groups them."""
    times = block.q.shape[1] // block.k.shape[1]
    if times == 1 or (kernel is not None and kernel.groups):
        return block
    return block._replace(k=block.k.repeat_interleave(times, 1), v=block.v.repeat_interleave(times, 1))


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Sums gradients over the heads of queries that share a head of keys: [B, H, T, D] to [B, K, T, D]."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _torch_forward(block: Block) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    generator = None if block.dropout is None else block.dropout.generator(block.q.device)
    for rows in _slices(block):
        scores, _ = _scores(block, rows)
        lse = scores.logsumexp(-1)
        # For a query that sees no key, exp(-inf - 0) is 0.
        weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
        if block.dropout is not None and generator is not None:
            weights = weights * block.dropout.factors(weights, generator)
        outs.append(weights.to(block.v.dtype) @ block.v)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _torch_backward(block: Block, result: Result) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, (grad, out, lse) = block.q, block.k, block.v, result
    generator = None if block.dropout is None else block.dropout.generator(q.device)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    for rows in _slices(block):
        scores, slope = _scores(block, rows)
        weights = (scores - lse[:, :, rows, None]).exp()
        g = grad[:, :, rows]
        kept, d = weights, (g @ v.mT).to(lse.dtype)
        if block.dropout is not None and generator is not None:
            factors = block.dropout.factors(weights, generator)
            kept, d = weights * factors, d * factors
        dv += (kept.to(g.dtype).mT @ g).to(lse.dtype)
        shared = (g.to(lse.dtype) * out[:, :, rows].to(lse.dtype)).sum(-1, keepdim=True)
        d = weights * (d - shared) * block.score.scale
        d = (d if slope is None else d * slope).to(q.dtype)
        dq[:, :, rows] = d @ k
        dk += (d.mT @ q[:, :, rows]).to(lse.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _scores(block: Block, rows: slice) -> tuple[Tensor, Tensor | None]:
    """Returns the scores of some queries in at least float32, and the slope of the soft cap.

    Keys that are not seen have minus infinity.
    """
    q, k, softcap = block.q[:, :, rows], block.k, block.score.softcap
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * block.score.scale
    slope = None
    if softcap is not None:
        bounded = torch.tanh(scores / softcap)
        scores, slope = bounded * softcap, 1 - bounded.square()
    mask = None if block.mask is None else block.mask.visible[:, :, rows]
    if block.causal:
        index = torch.arange(k.shape[2], device=k.device)
        mask = index <= index[rows, None]
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)), slope


def _slices(block: Block) -> list[slice]:
    """Returns slices of the queries with at most `_SCORES` scores each."""
    batch, heads, queries = block.q.shape[:3]
    rows = max(1, _SCORES // max(1, batch * heads * block.k.shape[2]))
    return [slice(first, min(first + rows, queries)) for first in range(0, queries, rows)]


@dataclass(frozen=True)
class Attention:
    """Parameters of an attention, apart from its tensors.

    Attributes:
        documents: Documents of the rows of the tensors.
        score: Score function of a query and a key.
        window: Number of tokens that a token sees, itself included; None for all before it.
        dropout: Dropout of weights, with the seed of the first pair of chunks; None without dropout.
    """

    documents: Documents
    score: Score
    window: int | None = None
    dropout: Dropout | None = None

    def dropout_of(self, query: int, key: int) -> Dropout | None:
        """Returns the dropout of a pair of chunks; None without dropout."""
        if self.dropout is None:
            return None
        return replace(self.dropout, seed=self.dropout.seed + query * self.documents.chunks + key)


class MergedOutput:
    """Output of an attention, to which blocks are added one by one.

    Args:
        q: Queries, [B, H, chunks * S, D].
        width: Width of the values, E.
    """

    def __init__(self, q: Tensor, width: int) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.dtype = q.dtype
        rows, heads, positions = q.shape[:3]
        # In memory [B, positions, H, E], as the output projection reads it.
        self.sum = q.new_zeros((rows, positions, heads, width), dtype=dtype).transpose(1, 2)
        self.lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        self._begun: set[tuple[int, int]] = set()

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Adds a block: the output of some queries over some keys, and its log-sum-exp.

        Args:
            rows: Slice of the queries; the slices of two calls must be equal or disjoint.
            out: Output of these queries, [B, H, rows, E].
            lse: Log-sum-exp, [B, H, rows]; minus infinity, with an output of zeros, for a query that sees no key.
        """
        total, known = self.sum[:, :, rows], self.lse[:, :, rows]
        if (rows.start, rows.stop) in self._begun:
            merge(total, known, out, lse)
        else:
            self._begun.add((rows.start, rows.stop))
            total.copy_(out)
            known.copy_(lse)

    def value(self) -> Tensor:
        """Returns the output in the queries' dtype."""
        return self.sum.to(self.dtype)


def add_sinks(out: MergedOutput, sinks: Tensor | None) -> None:
    """Adds attention sinks: each head has one more score, to which no value belongs (gpt_oss).

    The sum of exponentials grows by the sink's, so with `w = exp(lse) / (exp(lse) + exp(sink))` outputs become `w out`.
    With the new log-sum-exp, the backward of blocks needs no change.

    Args:
        out: Output, merged over all blocks; changed in place.
        sinks: Score of each head, [H]; None without sinks.
    """
    if sinks is None:
        return
    score = sinks.to(out.lse.dtype)[None, :, None]
    out.sum.mul_(torch.sigmoid(out.lse - score)[..., None])
    out.lse.copy_(torch.logaddexp(out.lse, score))


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Returns the gradient of sinks, [H]; None without sinks.

    Args:
        grad: Gradient of the output, [B, H, S, E].
        out: Output, with the sinks, [B, H, S, E].
        lse: Log-sum-exp, with the sinks, [B, H, S].
        sinks: Score of each head, [H]; None without sinks.
    """
    if sinks is None:
        return None
    weight = (sinks.to(lse.dtype)[None, :, None] - lse).exp()  # The sink's value is zero.
    gradient = -(weight * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2))
    return gradient.to(sinks.dtype)


def merge(total: Tensor, known: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merges the output of a block into the output of other blocks, in place, in one pass over both.

    With weights `exp(known)` and `exp(lse)` the mean of both outputs is `total + w (out - total)`, and
    `w = 1 / (1 + exp(known - lse))`. No operation here breaks a graph that torch.compile traces.

    Args:
        total: Output of the other blocks, [B, H, S, E], in at least float32; changed in place.
        known: Log-sum-exp of `total`, [B, H, S]; changed in place.
        out: Output of the block, [B, H, S, E], in any precision.
        lse: Log-sum-exp of `out`, [B, H, S].
    """
    lse = lse.to(known.dtype)
    # Where no key is seen in either, both outputs are zeros, and any weight gives zeros.
    weight = torch.sigmoid(lse - known).nan_to_num_(0.0)
    total.lerp_(out.to(total.dtype), weight[..., None])
    known.copy_(torch.logaddexp(known, lse))


def attend(
    what: Attention, out: MergedOutput, q: Tensor, queries: Sequence[int], k: Tensor, v: Tensor, keys: Sequence[int]
) -> None:
    """Adds the attention of some chunks of queries to some chunks of keys to the output.

    Args:
        what: Attention to compute.
        out: Output of these queries; added to.
        q: Queries, [B, H, chunks * S, D].
        queries: Numbers of the queries' chunks.
        k: Keys, [B, K, chunks * S, D].
        v: Values, [B, K, chunks * S, E].
        keys: Numbers of the keys' chunks.
    """
    for rows, _, block in _blocks(what, q, queries, k, v, keys):
        out.add(rows, *block_attention.forward(block))


def attend_backward(
    what: Attention,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    queries: Sequence[int],
    k: Tensor,
    v: Tensor,
    keys: Sequence[int],
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds the gradients of the attention of some chunks of queries to some chunks of keys.

    Args:
        what: Attention of the forward.
        grad: Gradient of the output, [B, H, chunks * S, E].
        out: Output of these queries, merged over all blocks, [B, H, chunks * S, E].
        lse: Log-sum-exp of these queries, merged over all blocks, [B, H, chunks * S].
        q: Queries, as for :func:`attend`.
        queries: Numbers of the queries' chunks.
        k: Keys, as for :func:`attend`.
        v: Values, as for :func:`attend`.
        keys: Numbers of the keys' chunks.
        into: Gradients of q, k and v; added to.
    """
    dq, dk, dv = into
    for rows, columns, block in _blocks(what, q, queries, k, v, keys):
        part = block_attention.backward(block, Result(grad[:, :, rows], out[:, :, rows], lse[:, :, rows]))
        dq[:, :, rows] += part[0]
        dk[:, :, columns] += part[1]
        dv[:, :, columns] += part[2]


def _blocks(
    what: Attention, q: Tensor, queries: Sequence[int], k: Tensor, v: Tensor, keys: Sequence[int]
) -> Iterator[tuple[slice, slice, Block]]:
    """Yields the blocks to compute, each with its slices of queries and keys; nothing on the meta device."""
    if q.device.type == "meta":
        return
    size = what.documents.size
    for at, query in enumerate(queries):
        rows = slice(at * size, (at + 1) * size)
        seen = [what.documents.seen(query, key, what.window) for key in keys]
        for kind, run in groupby(range(len(keys)), key=seen.__getitem__):
            places = list(run)
            if kind is Visibility.NOTHING:
                continue
            # Consecutive chunks that are fully seen form one block; any other chunk is a block of its own.
            for first, last in [(places[0], places[-1])] if kind is Visibility.ALL else [(to, to) for to in places]:
                columns = slice(first * size, (last + 1) * size)
                pair = query, keys[first]
                mask = what.documents.mask(*pair, what.window, q.device) if kind is Visibility.SOME else None
                tensors = q[:, :, rows], k[:, :, columns], v[:, :, columns]
                is_causal = kind is Visibility.CAUSAL
                yield rows, columns, Block(*tensors, what.score, is_causal, mask, what.dropout_of(*pair))
