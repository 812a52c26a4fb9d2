"""Distils over a vocabulary in chunks of tokens, so that neither model's logits are ever in memory for all tokens.

It follows :mod:`dlo_tasks.language.vocabulary_loss`: forward computes a chunk's logits of both models, and the
gradient together with the distance; backward only scales the gradients. A head that a strategy gathers when it is
called is called once, and computes all chunks inside: see :mod:`dlo_tasks.language.vocabulary_head`. If parts of it
are gathered by calls of their own, as those of a LoRA adapter are, it is called with all tokens.

The vocabulary may be split over ranks: each rank then computes its slice of both models' logits.

Shapes: N tokens, D width, E the teacher's width, V vocabulary, v this rank's slice of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlo_framework.distillation import LogitLoss, agreements, logit_losses
from dlo_framework.distributed.vocab_parallel import VocabularyShard
from dlo_framework.models.autocast import autocast_dtype
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.vocabulary_head import (
    VocabularyHead,
    can_run_inside,
    head_width,
    is_quantised,
    run_inside,
)
from dlo_tasks.language.vocabulary_loss import (
    ONCE,
    ChunkLosses,
    chunk_tokens,
    default_kernel,
    enter_stage,
    linear_losses,
    select_targets,
)

#: Tensors as large as a chunk's logits that a distance keeps at once: chunks are shorter than those of cross-entropy.
_COPIES = 4


def summed_distillation(
    student: VocabularyHead,
    hidden: Tensor,
    teacher: VocabularyHead,
    teacher_hidden: Tensor,
    targets: Tensor,
    loss: LogitLoss,
    chunk: int | None = None,
    count: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the tokens' distances, a scalar, and the number of tokens on which both models agree.

    Args:
        student: Head of the student.
        hidden: Hidden states of the student, `[N, D]`.
        teacher: Head of the teacher, whose vocabulary begins with the student's.
        teacher_hidden: Hidden states of the teacher, `[N, E]`.
        targets: Target ids, `[N]`; tokens with :data:`~dlo_tasks.language.batches.IGNORE_INDEX` are left out.
        loss: Distance.
        chunk: Tokens per chunk; by default computed from the vocabulary size.
        count: Number of targets, if known; see :func:`~dlo_tasks.language.vocabulary_loss.summed_loss`.
    """
    teacher, teacher_hidden, _, _ = enter_stage(teacher, teacher_hidden.detach(), targets, count)
    student, hidden, targets, count = enter_stage(student, hidden, targets, count)
    kernel, shard = default_kernel(hidden.device), student.shard
    calls_at_once = [head.is_gathered and not can_run_inside(head) for head in (student, teacher)]
    if not any(calls_at_once):
        waits = kernel == "columns"
        teacher_hidden, _ = select_targets(teacher_hidden.detach(), targets, count, waits=waits)
        hidden, targets = select_targets(hidden, targets, count, waits=waits)
    if shard is not None:
        hidden = shard.enter(hidden)
    theirs = _Teacher(teacher, teacher_hidden, shard, student.out_features)
    if calls_at_once[0]:  # Called on ranks without a token too.
        return _distillation_at_once(student, hidden, targets, theirs, loss)
    rows = chunk or chunk_tokens(_COPIES * head_width(student), len(targets), kernel)
    agreed = torch.zeros((), device=hidden.device)

    def chunks(head: VocabularyHead, states: Tensor) -> tuple[Tensor, Tensor]:
        linear: Any = head.module
        if student.is_product and not is_quantised(linear):
            dtype = autocast_dtype(states.device.type) or states.dtype
            compute = _chunk_distances(targets, theirs, loss, shard, student.softcap, dtype, agreed)
            total = theirs.run(lambda: linear_losses(states, linear, compute, dtype, rows, kernel))
        else:
            compute = _chunk_distances(targets, theirs, loss, shard, None, None, agreed)
            trained = [parameter for parameter in linear.parameters() if parameter.requires_grad]
            total = theirs.run(lambda: _ModuleLosses.apply(states, head, compute, rows, *trained))
        return total, agreed

    return run_inside(student, hidden, chunks) if student.is_gathered else chunks(student, hidden)


def _chunk_distances(
    targets: Tensor,
    theirs: _Teacher,
    loss: LogitLoss,
    shard: VocabularyShard | None,
    softcap: float | None,
    dtype: torch.dtype | None,
    agreed: Tensor,
) -> ChunkLosses:
    """Returns a function of a chunk's logits that computes distances and adds to the number of `agreed` tokens.

    Args:
        targets: Target ids, `[N]`.
        theirs: Logits of the teacher.
        loss: Distance.
        shard: This rank's slice of the vocabulary; None for all of it.
        softcap: Soft bound that the logits do not have yet.
        dtype: Dtype of the gradient; None for that of the logits.
        agreed: Number of tokens on which both agree, a scalar that is added to.
    """

    def compute(start: int, logits: Tensor, need_slope: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        ignored = targets[start : start + len(logits), None] == IGNORE_INDEX
        wide = torch.promote_types(logits.dtype, torch.float32)
        student, teacher = logits.to(wide), theirs.logits(start, start + len(logits)).to(wide)
        bent = None
        if softcap is not None:
            student = student.div_(softcap).tanh_()
            bent = 1 - student.square() if need_slope else None  # the slope of cap * tanh(x / cap)
            student = student.mul_(softcap)
        agreed.add_(agreements(student, teacher, shard).masked_fill_(ignored[:, 0], False).sum())
        losses, slope = loss.losses_and_slope(student, teacher, shard, need_slope=need_slope)
        if slope is not None:
            slope = (slope if bent is None else slope.mul_(bent)).to(dtype or logits.dtype)
        return losses, slope, ignored

    return compute


class _Teacher:
    """Teacher's logits of spans of tokens, in the autocast in which it is made.

    Of a larger vocabulary they are those of the first tokens, which the student has too.

    Args:
        head: Head of the teacher.
        hidden: Hidden states of the teacher, `[N, E]`.
        shard: This rank's slice of the student's vocabulary; None for all of it.
        width: Size of the student's vocabulary; None if its head does not say it.
    """

    def __init__(self, head: VocabularyHead, hidden: Tensor, shard: VocabularyShard | None, width: int | None) -> None:
        self.head, self.hidden, self.shard, self.width = head, hidden, shard, width
        self._dtype = autocast_dtype(hidden.device.type)
        theirs = head.shard
        self._is_split_alike = (
            theirs is not None and shard is not None and (theirs.first, theirs.count) == (shard.first, shard.count)
        )
        calls_at_once = head.is_gathered and not can_run_inside(head)
        self._complete = self._compute(hidden) if calls_at_once else None

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """Returns the result of a function that calls :meth:`logits`, called where the head's weights are available."""
        if self._complete is not None or not self.head.is_gathered:
            return compute()
        computed: list[Tensor] = []
        trains = torch.is_grad_enabled()

        def inside(head: VocabularyHead, hidden: Tensor) -> Tensor:
            self.head, self.hidden = head, hidden
            with torch.set_grad_enabled(trains):
                computed.append(compute())
            return hidden

        with torch.no_grad():
            run_inside(self.head, self.hidden, inside)
        return computed[0]

    def logits(self, start: int, stop: int) -> Tensor:
        """Returns the logits over the student's slice of the vocabulary, `[n, v]`, which may be overwritten."""
        if self._complete is not None:
            return self._complete[start:stop].clone()
        return self._compute(self.hidden[start:stop])

    def _compute(self, tokens: Tensor) -> Tensor:
        autocast = torch.autocast(tokens.device.type, dtype=self._dtype, enabled=self._dtype is not None)
        with torch.no_grad(), autocast:
            if self._is_split_alike:
                return self.head.own_logits(tokens)
            logits = self.head.logits(tokens)
        shard = self.shard
        return logits[:, : self.width] if shard is None else logits.narrow(1, shard.first, shard.count)


def _distillation_at_once(
    head: VocabularyHead, hidden: Tensor, targets: Tensor, theirs: _Teacher, loss: LogitLoss
) -> tuple[Tensor, Tensor]:
    """Computes the logits of all tokens by one call of the head."""
    logits = head.logits(hidden) if head.shard is None else head.own_logits(hidden)
    teacher, ignored = theirs.run(lambda: theirs.logits(0, len(targets))), targets == IGNORE_INDEX
    agreed = agreements(logits.detach(), teacher, head.shard).masked_fill(ignored, False).sum()
    return logit_losses(loss, logits, teacher, head.shard).masked_fill(ignored, 0).sum(), agreed.float()


class _ModuleLosses(torch.autograd.Function):
    """Sums the losses of a head that is more than a product.

    Forward has the gradients of the hidden states and of the head's parameters, by autograd within a chunk. The head is
    not called again in backward, when the teacher's may be freed.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: VocabularyHead, compute: ChunkLosses, rows: int, *trained: Tensor
    ) -> Tensor:
        needs = ctx.needs_input_grad[0] or bool(trained)
        sums = [torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in trained]
        of_hidden, total = torch.zeros_like(hidden), torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), rows):
            h = hidden[start : start + rows].detach().requires_grad_(needs)
            with torch.set_grad_enabled(needs):
                logits = head.logits(h) if head.shard is None else head.own_logits(h)
            losses, slope, ignored = compute(start, logits.detach().clone(), needs)
            assert ignored is not None, "a distillation always says which tokens have no target"
            total += losses.masked_fill_(ignored, 0).sum()
            if slope is None:
                continue
            gradients = torch.autograd.grad(logits, [h, *trained], slope.masked_fill(ignored, 0), allow_unused=True)
            if gradients[0] is not None:
                of_hidden[start : start + rows] = gradients[0]
            for one, part in zip(sums, gradients[1:], strict=True):
                if part is not None:
                    one += part
        ctx.grads = [of_hidden if ctx.needs_input_grad[0] else None, *sums]
        ctx.dtypes = [hidden.dtype, *(tensor.dtype for tensor in trained)]
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients, ctx.grads = ctx.grads, None
        if gradients is None:
            raise RuntimeError(ONCE)
        scaled = [
            None if part is None else part.mul_(grads[0]).to(dtype)
            for part, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (scaled[0], None, None, None, *scaled[1:])
