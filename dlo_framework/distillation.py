"""The contract between distillation and tasks: a distance between two models' logits, and its mean over a batch.

A plug-in defines the distance, a :class:`LogitLoss`; a task computes its mean over a batch
(:meth:`~dlo_framework.task_abilities.Distillable.distillation_loss`), because only the task knows which samples or
tokens count, and how logits are computed from its outputs.

Shapes: n samples or tokens, C classes (the vocabulary of a language model), c classes of this rank's shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dlo_framework.distributed.vocab_parallel import VocabularyShard


class LogitLoss(ABC):
    """Distance between a student's and a teacher's logits, one number per sample."""

    @abstractmethod
    def losses_and_slope(
        self, student: Tensor, teacher: Tensor, shard: VocabularyShard | None = None, *, need_slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the losses, `[n, 1]`, and their gradients with respect to the student's logits, `[n, c]`.

        Args:
            student: Logits of the student, `[n, c]`, in float32 or wider; may be overwritten.
            teacher: Logits of the teacher, of the same shape and dtype; may be overwritten.
            shard: Shard of the classes that both have; None for all classes, c = C.
            need_slope: Whether to compute the gradients; otherwise None is returned for them.
        """


class Distilled(NamedTuple):
    """Result of a task's distillation over a batch, normalised as its own loss.

    Attributes:
        loss: Mean distance, a scalar with a gradient.
        agreement: Share of samples whose most probable class is the teacher's, a scalar.
    """

    loss: Tensor
    agreement: Tensor


def logit_losses(loss: LogitLoss, student: Tensor, teacher: Tensor, shard: VocabularyShard | None = None) -> Tensor:
    """Returns the losses of samples, `[n]` in float32 at least; their gradient reaches the student alone.

    Args:
        loss: Distance.
        student: Logits, `[n, c]`.
        teacher: Logits of the teacher, `[n, c]`.
        shard: Shard of the classes that both have; None for all classes.
    """
    losses: Tensor = _LogitLosses.apply(student, teacher, loss, shard)
    return losses


def agreements(student: Tensor, teacher: Tensor, shard: VocabularyShard | None = None) -> Tensor:
    """Returns whether both models have the highest logit at the same class, bool `[n]`.

    Args:
        student: Logits, `[n, c]`.
        teacher: Logits of the teacher, `[n, c]`.
        shard: Shard of the classes that both have; None for all classes.
    """
    if shard is None:
        return student.argmax(dim=1) == teacher.argmax(dim=1)
    return shard.argmax(student) == shard.argmax(teacher)


class _LogitLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, loss: LogitLoss, shard: VocabularyShard | None) -> Tensor:
        dtype = torch.promote_types(student.dtype, torch.float32)
        with torch.autocast(student.device.type, enabled=False):
            # Copies, because a loss may overwrite its arguments.
            ours, theirs = student.detach().to(dtype, copy=True), teacher.detach().to(dtype, copy=True)
            losses, slope = loss.losses_and_slope(ours, theirs, shard, need_slope=ctx.needs_input_grad[0])
        ctx.dtype = student.dtype
        if slope is not None:
            ctx.save_for_backward(slope)
        return losses[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return (slope * grads[0][:, None]).to(ctx.dtype), None, None, None
