"""Distils over a vocabulary in chunks of tokens, so that neither model's logits are ever in memory for all tokens.

It follows :mod:`dlo_tasks.llm.vocabulary_loss`: forward computes a chunk's logits of both models, and the gradient
together with the distance; backward only scales the gradients. A head that a strategy gathers when it is called is
called once, and computes all chunks inside: see :mod:`dlo_tasks.llm.vocabulary_head`. If parts of it are gathered by
calls of their own, as those of a LoRA adapter are, it is called with all tokens.

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
from dlo_tasks.llm.batches import IGNORE_INDEX
from dlo_tasks.llm.vocabulary_head import (
    VocabularyHead,
    autocast_dtype,
    can_run_inside,
    head_width,
    is_quantised,
    run_inside,
)
from dlo_tasks.llm.vocabulary_loss import (
    HeadGradients,
    Kernel,
    chunk_tokens,
    default_kernel,
    project_chunks,
    select_targets,
)

#: Tensors as large as a chunk's logits that a distance keeps at once: chunks are shorter than those of cross-entropy.
_COPIES = 4

#: Error of a second backward.
_ONCE = "backward of distillation over the vocabulary must run once, got a second call; compute the loss again"


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
        targets: Target ids, `[N]`; tokens with :data:`~dlo_tasks.llm.batches.IGNORE_INDEX` are left out.
        loss: Distance.
        chunk: Tokens per chunk; by default computed from the vocabulary size.
        count: Number of targets, if known; see :func:`~dlo_tasks.llm.vocabulary_loss.summed_loss`.
    """
    kernel, shard = default_kernel(hidden.device), student.shard
    calls_at_once = [head.is_gathered and not can_run_inside(head) for head in (student, teacher)]
    if not any(calls_at_once):
        waits = kernel == "columns"
        teacher_hidden, _ = select_targets(teacher_hidden.detach(), targets, count, waits=waits)
        hidden, targets = select_targets(hidden, targets, count, waits=waits)
    if shard is not None:
        hidden = shard.enter(hidden)
    theirs = _Teacher(teacher, teacher_hidden, shard, getattr(student.module, "out_features", None))
    if calls_at_once[0]:  # Called on ranks without a token too.
        return _distillation_at_once(student, hidden, targets, theirs, loss)
    rows = chunk or _rows(student, len(targets), kernel)

    def chunks(head: VocabularyHead, states: Tensor) -> tuple[Tensor, Tensor]:
        linear: Any = head.module
        if student.is_product and not is_quantised(linear):
            dtype = autocast_dtype(states.device) or states.dtype
            options = (student.softcap, dtype, rows, shard, kernel, loss)
            total, agreed = _LinearDistillation.apply(states, linear.weight, linear.bias, targets, theirs, *options)
            return total, agreed
        trained = [parameter for parameter in linear.parameters() if parameter.requires_grad]
        total, agreed = _ModuleDistillation.apply(states, head, targets, theirs, rows, loss, *trained)
        return total, agreed

    return run_inside(student, hidden, chunks) if student.is_gathered else chunks(student, hidden)


def _rows(head: VocabularyHead, tokens: int, kernel: Kernel) -> int:
    return chunk_tokens(_COPIES * head_width(head), tokens, kernel)


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
        self._dtype = autocast_dtype(hidden.device)
        theirs = head.shard
        self._is_split_alike = (
            theirs is not None and shard is not None and (theirs.first, theirs.count) == (shard.first, shard.count)
        )
        calls_at_once = head.is_gathered and not can_run_inside(head)
        self._complete = self._compute(hidden) if calls_at_once else None

    def run(self, loop: Callable[[], None]) -> None:
        """Runs a loop over chunks, which calls :meth:`logits`, where the head's weights are available; once."""
        if self._complete is not None or not self.head.is_gathered:
            loop()
            return

        def inside(head: VocabularyHead, hidden: Tensor) -> Tensor:
            self.head, self.hidden = head, hidden
            loop()
            return hidden

        with torch.no_grad():
            run_inside(self.head, self.hidden, inside)

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
    found: list[Tensor] = []
    theirs.run(lambda: found.append(theirs.logits(0, len(targets))))
    (teacher,), ignored = found, targets == IGNORE_INDEX
    agreed = agreements(logits.detach(), teacher, head.shard).masked_fill(ignored, False).sum()
    return logit_losses(loss, logits, teacher, head.shard).masked_fill(ignored, 0).sum(), agreed.float()


class _ModuleDistillation(torch.autograd.Function):
    """Sums the distances between the logits of a head that is more than a product, and the teacher's.

    Forward has the gradients of the hidden states and of the head's parameters, by autograd within a chunk. The head is
    not called again in backward, when the teacher's may be freed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: VocabularyHead,
        targets: Tensor,
        theirs: _Teacher,
        rows: int,
        loss: LogitLoss,
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[0] or bool(trained)
        wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in trained]
        sums = [torch.zeros(t.shape, dtype=dtype, device=t.device) for t, dtype in zip(trained, wide, strict=True)]
        of_hidden = torch.zeros_like(hidden)
        total, agreed = (torch.zeros((), device=hidden.device) for _ in range(2))

        def loop() -> None:
            for start in range(0, len(targets), rows):
                h = hidden[start : start + rows].detach().requires_grad_(needs)
                ignored = targets[start : start + rows, None] == IGNORE_INDEX
                with torch.set_grad_enabled(needs):
                    logits = head.logits(h) if head.shard is None else head.own_logits(h)
                student, teacher = logits.detach().clone(), theirs.logits(start, start + len(h)).to(logits.dtype)
                agreed.add_(agreements(student, teacher, head.shard).masked_fill_(ignored[:, 0], False).sum())
                losses, slope = loss.losses_and_slope(student, teacher, head.shard, need_slope=needs)
                total.add_(losses.masked_fill_(ignored, 0).sum())
                if slope is None:
                    continue
                slope = slope.masked_fill(ignored, 0).to(logits.dtype)
                found = torch.autograd.grad(logits, [h, *trained], slope, allow_unused=True)
                if found[0] is not None:
                    of_hidden[start : start + rows] = found[0]
                for one, part in zip(sums, found[1:], strict=True):
                    if part is not None:
                        one += part

        theirs.run(loop)
        ctx.grads = [of_hidden if ctx.needs_input_grad[0] else None, *sums]
        ctx.dtypes = [hidden.dtype, *(tensor.dtype for tensor in trained)]
        ctx.mark_non_differentiable(agreed)
        return total, agreed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found, ctx.grads = ctx.grads, None
        if found is None:
            raise RuntimeError(_ONCE)
        scaled = [
            None if part is None else part.mul_(grads[0]).to(dtype)
            for part, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return (scaled[0], *(None,) * 5, *scaled[1:])


class _LinearDistillation(torch.autograd.Function):
    """Sums the distances between `hidden @ weight.T + bias` and the teacher's logits; forward has the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        theirs: _Teacher,
        softcap: float | None,
        dtype: torch.dtype,
        rows: int,
        shard: VocabularyShard | None,
        kernel: Kernel,
        loss: LogitLoss,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            parts = HeadGradients(hidden, weight, bias, dtype, ctx.needs_input_grad[:3])
            total, agreed = (torch.zeros((), device=hidden.device) for _ in range(2))

            def loop() -> None:
                for start, h, logits in project_chunks(hidden, parts.weight, bias, rows, kernel):
                    ignored = targets[start : start + rows, None] == IGNORE_INDEX
                    teacher = theirs.logits(start, start + len(h)).to(wide)
                    student, bent = logits.to(wide), None
                    if softcap is not None:
                        student = student.div_(softcap).tanh_()
                        bent = 1 - student.square() if parts.wanted else None  # the slope of cap * tanh(x / cap)
                        student = student.mul_(softcap)
                    agreed.add_(agreements(student, teacher, shard).masked_fill_(ignored[:, 0], False).sum())
                    losses, slope = loss.losses_and_slope(student, teacher, shard, need_slope=parts.wanted)
                    total.add_(losses.masked_fill_(ignored, 0).sum())
                    if slope is not None:
                        slope = slope if bent is None else slope.mul_(bent)
                        parts.add(start, h, slope.to(dtype), ignored)

            theirs.run(loop)
        ctx.parts = parts
        ctx.mark_non_differentiable(agreed)
        return total, agreed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts, ctx.parts = ctx.parts, None
        if parts is None:
            raise RuntimeError(_ONCE)
        return (*parts.scaled(grads[0]), *(None,) * 8)
