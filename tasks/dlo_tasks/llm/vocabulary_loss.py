"""The loss over a vocabulary, some tokens at a time, so that the logits of all tokens never stand in memory.

Liger Kernel: Efficient Triton Kernels for LLM Training. Hsu et al., 2024, arXiv 2410.10989. As there, a chunk's
gradient is computed with its loss, while its logits are at hand; backward only scales what forward has left.
Departures: tokens without a target are left out before anything is computed, soft-capping (Gemma 2) is part of it, and
the same code runs on every device.

A head whose vocabulary is split over ranks (tensor parallelism) serves as well: see
:mod:`dlo_framework.distributed.vocabulary`.

torch 2.15 has `torch.nn.functional.linear_cross_entropy`, which does likewise, without soft-capping;
`benchmarks/vocabulary_loss.py` compares.

Shapes: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dlo_framework.distributed.vocabulary import VocabularyShard, exp_and_losses, shard_of

#: The label of a token without a target, as transformers and torch have it.
NO_TARGET = -100
#: Tokens of a chunk, and logits of a chunk at most: one large enough to keep the matrix products busy.
CHUNK_TOKENS, CHUNK_LOGITS = 256, 2**25


@dataclass(frozen=True)
class VocabularyHead:
    """What turns hidden states into logits: `cap * tanh(scale * head(hidden) / cap)`.

    Attributes:
        module: the projection, `[N, D]` to `[N, V]`.
        scale: of what it returns (Cohere, Granite).
        softcap: what bounds the logits softly (Gemma 2: 30); None for none.
    """

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @property
    def shard(self) -> VocabularyShard | None:
        """Which part of the vocabulary this rank's projection has; None if all of it."""
        return shard_of(self.module)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of a few tokens, `[n, V]` in float32; of all the vocabulary, also where it is split."""
        return self._bent(self.module(hidden))

    def summed(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of the cross-entropies of tokens that have a target, from all their logits at once.

        Where the vocabulary is split, `hidden` has passed :meth:`VocabularyShard.enter`, and no rank makes all logits.
        """
        if self.shard is None:
            return F.cross_entropy(self.logits(hidden), targets, ignore_index=NO_TARGET, reduction="sum")
        losses = self.shard.cross_entropy(self.own_logits(hidden), targets)
        return losses.masked_fill(targets == NO_TARGET, 0).sum()

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of a few tokens in float32 for this rank's part of the vocabulary, `[n, v]`."""
        return self._bent(self.module(hidden, split=True))

    def _bent(self, logits: Tensor) -> Tensor:
        found = logits.float()
        if self.scale != 1.0:
            found = found * self.scale
        return found if self.softcap is None else self.softcap * torch.tanh(found / self.softcap)

    @property
    def is_gathered(self) -> bool:
        """Whether a strategy waits for the projection to be called, to gather its weights then."""
        parts = [self.module, *self.module.children()]
        hooked = any(part._forward_pre_hooks or part._forward_hooks for part in parts)
        return hooked or any(_is_elsewhere(parameter) for parameter in self.module.parameters())

    @property
    def fuses(self) -> bool:
        """Whether the projection is a plain matrix product whose weight is all there: LoRA may have adapted it."""
        plain = type(self.module) is nn.Linear or (self.shard is not None and isinstance(self.module, nn.Linear))
        return plain and self.scale == 1.0 and not self.is_gathered


def _is_elsewhere(parameter: Tensor) -> bool:
    """Whether a rank holds a part of a parameter: a DTensor's, or a freed one's, whose memory comes back with use."""
    return isinstance(parameter, DTensor) or (parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0)


def summed_loss(
    head: VocabularyHead, hidden: Tensor, targets: Tensor, chunk: int | None = None, count: int | None = None
) -> Tensor:
    """Returns the sum of the tokens' cross-entropies, a scalar in float32; 0 without targets.

    A head that is gathered when it is called is called once, with all tokens: ranks may have different numbers of
    targets, and all of them have to call it as often.

    Args:
        head: of the model.
        hidden: `[N, D]`, the last block's normalised output.
        targets: `[N]`, ids; :data:`NO_TARGET` where there is none.
        chunk: tokens of a chunk; by default as many as suits the vocabulary.
        count: how many of them are targets, where it is known. Else the device is asked, which does all of the model's
            forward first.
    """
    if isinstance(hidden, FakeTensor):  # Without values or memory: somebody counts the work.
        return head.summed(hidden, targets)
    if head.is_gathered:
        return whole_loss(head, hidden, targets)
    if head.shard is not None:
        hidden = head.shard.enter(hidden)
    hidden, targets = _with_targets(hidden, targets, count)
    if head.fuses:
        linear: Any = head.module
        dtype = _autocast_dtype(hidden.device) or hidden.dtype
        found: Tensor = _LinearCrossEntropy.apply(
            *(hidden, linear.weight, linear.bias, targets, head.softcap, dtype),
            *(chunk or _chunk(linear.weight.shape[0]), head.shard),
        )
        return found
    rows = chunk or CHUNK_TOKENS
    losses = [checkpoint(_chunk_loss, head, h, t, use_reentrant=False) for h, t in _chunks(hidden, targets, rows)]
    return torch.stack(losses).sum() if losses else hidden.float().sum()


@torch.no_grad()
def measure(head: VocabularyHead, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each token's cross-entropy, `[N]` in float32, and whether its target has the highest logit, `[N]`.

    Args:
        head: of the model.
        hidden: `[N, D]`.
        targets: `[N]`; those of :data:`NO_TARGET` have loss 0 and are no hit.
    """
    losses = torch.zeros(targets.shape, device=hidden.device)
    hits = torch.zeros(targets.shape, dtype=torch.bool, device=hidden.device)
    if head.is_gathered:
        chunks: Any = [torch.arange(len(targets), device=hidden.device)]
    else:
        chunks = torch.nonzero(targets != NO_TARGET).flatten().split(CHUNK_TOKENS)
    for some in chunks:
        of_these = targets[some]
        if head.shard is None:
            logits = head.logits(hidden[some])
            losses[some] = F.cross_entropy(logits, of_these, ignore_index=NO_TARGET, reduction="none")
            best = logits.argmax(dim=1)
        else:
            logits = head.own_logits(hidden[some])
            losses[some] = head.shard.cross_entropy(logits, of_these).masked_fill(of_these == NO_TARGET, 0)
            best = head.shard.highest(logits)
        hits[some] = (best == of_these) & (of_these != NO_TARGET)
    return losses, hits


def _with_targets(hidden: Tensor, targets: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """Leaves out the tokens without a target."""
    if count == len(targets):
        return hidden, targets
    are = targets != NO_TARGET
    if count is None or are.device.type not in ("cpu", "cuda"):  # Others (MPS in torch 2.11) lack it.
        keep = torch.nonzero(are).flatten()
    else:
        keep = torch.nonzero_static(are, size=count).flatten()
    return (hidden, targets) if len(keep) == len(targets) else (hidden[keep], targets[keep])


def _chunk_loss(head: VocabularyHead, hidden: Tensor, targets: Tensor) -> Tensor:
    return head.summed(hidden, targets)


def _chunk(vocabulary: int) -> int:
    return max(1, min(CHUNK_TOKENS, CHUNK_LOGITS // vocabulary))


def _chunks(hidden: Tensor, targets: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(hidden.split(rows), targets.split(rows), strict=True) if len(targets) else ()


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of cross-entropies of `hidden @ weight.T + bias`; its gradients are made in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        dtype: torch.dtype,
        rows: int,
        shard: VocabularyShard | None,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            parts = _Gradients(hidden, weight, bias, dtype, ctx.needs_input_grad[:3])
            total = torch.zeros((), device=hidden.device)
            buffer: Tensor | None = None
            for start in range(0, len(targets), rows):
                h, t = hidden[start : start + rows].to(dtype), targets[start : start + rows, None]
                if buffer is None or buffer.shape[1] != len(h):
                    buffer = torch.empty(weight.shape[0], len(h), dtype=dtype, device=hidden.device)
                logits = _project(h, parts.weight, bias, buffer)
                losses, slope = _losses_and_slope(logits, t, softcap, shard, need_slope=parts.wanted)
                total += losses.sum()
                if slope is not None:
                    parts.add(start, h, slope)
        ctx.parts = parts
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts, ctx.parts = ctx.parts, None
        if parts is None:
            raise RuntimeError("the loss over the vocabulary has no second backward; its gradients are used up")
        return (*parts.scaled(grads[0]), None, None, None, None, None)


class _Gradients:
    """The gradients of hidden states, weight and bias, as far as they are wanted, chunk by chunk.

    The weight's is summed in single precision at least: a sum of bf16 numbers loses those that come late.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, wanted: tuple[bool, ...]
    ) -> None:
        self.weight = weight.detach().to(dtype)
        self.wanted = any(wanted)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.hidden = torch.empty_like(hidden, dtype=dtype) if wanted[0] else None
        self.of_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
        self.bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and wanted[2] else None

    def add(self, start: int, h: Tensor, slope: Tensor) -> None:
        """Takes a chunk: `h [n, D]` and the loss's slope in its logits, `[n, V]`."""
        if self.hidden is not None:
            torch.mm(slope, self.weight, out=self.hidden[start : start + len(h)])
        if self.of_weight is not None and self.of_weight.dtype == slope.dtype:
            self.of_weight.addmm_(slope.t(), h)
        elif self.of_weight is not None:
            self.of_weight += slope.t() @ h
        if self.bias is not None:
            self.bias += slope.sum(dim=0)

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the three gradients, times the slope of what has become of the loss."""
        found = (self.hidden, self.of_weight, self.bias)
        return tuple(
            None if tensor is None else tensor.mul_(factor).to(dtype)
            for tensor, dtype in zip(found, self.dtypes, strict=True)
        )


def _project(h: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Returns the logits `[n, V]`, a view of `out [V, n]`: in that order the products are faster on a CPU."""
    torch.mm(weight, h.t(), out=out)
    if bias is not None:
        out += bias.detach().to(h.dtype)[:, None]
    return out.t()


def _losses_and_slope(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    shard: VocabularyShard | None = None,
    *,
    need_slope: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the losses `[n, 1]` in float32 at least, and their slope in the logits, `[n, V]` in the logits' dtype.

    Args:
        logits: `[n, V]`, overwritten.
        targets: `[n, 1]`.
        softcap: see :class:`VocabularyHead`.
        shard: of the vocabulary, if the logits are of a part of it, `[n, v]`.
        need_slope: whether to compute it.
    """
    dtype = logits.dtype
    values = logits.to(torch.promote_types(dtype, torch.float32))
    bent = None
    if softcap is not None:
        values = values.div_(softcap).tanh_()
        bent = 1 - values.square() if need_slope else None  # the slope of cap * tanh(x / cap)
        values = values.mul_(softcap)
    if shard is None:
        columns, own = targets, None
        highest = values.amax(dim=1, keepdim=True)
        at_target = values.gather(1, columns)
        values = values.sub_(highest).exp_()
        total = values.sum(dim=1, keepdim=True)
        losses = total.log() + highest - at_target
    else:
        columns, own = shard.place(targets)
        losses, total = exp_and_losses(values, columns, own, shard.communicator)
    if not need_slope:
        return losses, None
    values = values.div_(total)
    values.scatter_(1, columns, values.gather(1, columns) - (1 if own is None else own.to(values.dtype)))
    if bent is not None:
        values = values.mul_(bent)
    return losses, values if values.dtype == dtype else logits.copy_(values)


def whole_loss(head: VocabularyHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """Returns what :func:`summed_loss` does, from the logits of all tokens at once."""
    return head.summed(hidden if head.shard is None else head.shard.enter(hidden), targets)
