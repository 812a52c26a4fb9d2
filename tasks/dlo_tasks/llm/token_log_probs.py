"""Computes the log-probability of each target in chunks of tokens, so that all logits are never in memory at once.

:mod:`dlo_tasks.llm.vocabulary_loss` sums the losses, whose gradient is then known but for a factor, and computes it in
forward. Here each token's gradient has a factor of its own, which follows from all tokens of an answer: backward
computes a chunk's logits again, scales the gradient of each token, and frees them.

Shapes: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from dlo_framework.distributed.vocab_parallel import VocabularyShard
from dlo_tasks.llm import vocabulary_loss
from dlo_tasks.llm.gathered_head import run_inside
from dlo_tasks.llm.vocabulary_loss import IGNORE_INDEX, Kernel, VocabularyHead


def token_log_probs(
    head: VocabularyHead, hidden: Tensor, targets: Tensor, chunk: int | None = None, count: int | None = None
) -> Tensor:
    """Returns the log-probability of each token's target, `[N]` in float32 or wider; 0 for tokens without one.

    A head that is gathered on use is called once, with all chunks inside the call: ranks must call it equally often.
    One with a LoRA adapter, a factor or another `output_dtype` computes all logits at once then.

    Args:
        head: Head of the model.
        hidden: Hidden states, `[N, D]`: the last block's normalised output.
        targets: Target ids, `[N]`; :data:`IGNORE_INDEX` for tokens without one.
        chunk: Tokens per chunk; by default computed from the vocabulary size.
        count: Number of targets, if known; see :func:`dlo_tasks.llm.vocabulary_loss.summed_loss`.
    """
    if isinstance(hidden, FakeTensor):
        return -token_losses(head, hidden, targets)
    shard = head.shard
    if shard is not None:
        hidden = shard.enter(hidden)
    is_target = targets != IGNORE_INDEX
    kernel = vocabulary_loss.default_kernel(hidden.device)
    some, of_these = vocabulary_loss.select_targets(hidden, targets, count, waits=kernel == "columns")

    def fused(head: VocabularyHead, hidden: Tensor) -> Tensor:
        linear: Any = head.module
        if vocabulary_loss.is_quantised(linear):  # In the call that gathers it.
            return token_losses(head, hidden, of_these)
        dtype = vocabulary_loss.autocast_dtype(hidden.device) or hidden.dtype
        rows = chunk or vocabulary_loss.chunk_tokens(linear.weight.shape[0], len(of_these), kernel)
        losses: Tensor = _TokenLosses.apply(
            *(hidden, linear.weight, linear.bias, of_these, head.softcap, dtype, rows, shard, kernel)
        )
        return losses

    if head.fuses:
        losses = run_inside(head, some, fused) if head.is_gathered else fused(head, some)
    elif head.is_gathered:
        losses = token_losses(head, some, of_these)
    else:
        rows = chunk or vocabulary_loss.chunk_tokens(vocabulary_loss.head_width(head), len(of_these), kernel)
        chunks = zip(some.split(rows), of_these.split(rows), strict=True) if len(of_these) else ()
        found = [checkpoint(token_losses, head, h, t, use_reentrant=False) for h, t in chunks]
        losses = torch.cat(found) if found else some.float().sum(dim=1)
    if len(losses) == len(targets):
        return -losses
    return torch.zeros(targets.shape, dtype=losses.dtype, device=losses.device).masked_scatter(is_target, -losses)


def token_losses(head: VocabularyHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """Returns each token's cross-entropy, `[N]`, from all their logits at once; 0 for tokens without a target.

    Where the vocabulary is split, pass `hidden` through :meth:`VocabularyShard.enter` first.
    """
    if head.shard is None:
        return F.cross_entropy(head.logits(hidden), targets, ignore_index=IGNORE_INDEX, reduction="none")
    losses = head.shard.cross_entropy(head.own_logits(hidden), targets)
    return losses.masked_fill(targets == IGNORE_INDEX, 0)


class _TokenLosses(torch.autograd.Function):
    """Cross-entropies of `hidden @ weight.T + bias`, `[N]`; backward computes the logits again."""

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
        kernel: Kernel,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.options = (softcap, dtype, rows, shard, kernel)
        found = [losses for _, _, losses, _ in _chunks(hidden, weight, bias, targets, *ctx.options, need_slope=False)]
        return torch.cat(found) if found else hidden.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        (grad,) = grads
        dtype = ctx.options[1]
        with torch.no_grad():
            parts = vocabulary_loss.HeadGradients(hidden, weight, bias, dtype, ctx.needs_input_grad[:3])
            for start, h, _, slope in _chunks(hidden, weight, bias, targets, *ctx.options, need_slope=True):
                parts.add(start, h, slope.mul_(grad[start : start + len(h), None]))
            return (*parts.scaled(torch.ones((), device=grad.device)), *(None,) * 6)


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    dtype: torch.dtype,
    rows: int,
    shard: VocabularyShard | None,
    kernel: Kernel,
    *,
    need_slope: bool,
) -> Any:
    """Yields each chunk's first token, hidden states `[n, D]`, losses `[n]` and their gradient `[n, V]`, or None."""
    with torch.autocast(hidden.device.type, enabled=False):
        weight = weight.detach().to(dtype)
        buffer: Tensor | None = None
        for start in range(0, len(targets), rows):
            h, t = hidden[start : start + rows].detach().to(dtype), targets[start : start + rows, None]
            ignored = t == IGNORE_INDEX
            if kernel == "columns":
                if buffer is None or buffer.shape[1] != len(h):
                    buffer = torch.empty(weight.shape[0], len(h), dtype=dtype, device=hidden.device)
                logits = vocabulary_loss.project_columns(h, weight, bias, buffer)
            else:
                if buffer is None:
                    buffer = torch.empty(min(rows, len(targets)), len(weight), dtype=dtype, device=hidden.device)
                logits = vocabulary_loss.project_rows(h, weight, bias, buffer[: len(h)])
            losses, slope = vocabulary_loss.losses_and_slope(
                logits, t.clamp(min=0), softcap, shard, need_slope=need_slope
            )
            if slope is not None:
                slope = slope.masked_fill_(ignored, 0)
            yield start, h, losses.masked_fill_(ignored, 0)[:, 0], slope
