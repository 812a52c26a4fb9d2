"""Losses that are computed inside a model, and whose gradients join those of the step's loss in backward.

:func:`attach_loss` leaves a tensor unchanged, and adds the gradient of a second loss in backward, as in Megatron. So
the loss needs no way out of the model: it works inside pipeline stages, recomputed blocks and sharded units. It is
scaled like the step's loss, by accumulation, by loss scaling and by a pipeline's micro-batches:
:func:`follow_gradient` sets the scale.

:class:`RouterCounts` counts a router's choices over the micro-batches of an optimizer step, for losses of the global
batch. Demons in the Detail: On Implementing Load Balancing Loss for Training Specialized Mixture-of-Expert Models. Qiu
et al., 2025, arXiv 2501.11873: the load-balancing loss takes its fractions from all ranks, and from a buffer of the
counts of the micro-batches so far. The first micro-batch knows its own tokens only, the last one those of the whole
step. A recomputed forward uses the counts of the forward that it repeats. A pipeline runs further forwards before that;
it names the micro-batch of each by :func:`in_micro_batch`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from dlo_framework.models.recompute import in_backward


class _Scale:
    """Gradient of the step's loss in the current backward: 1 in a plain loop."""

    value: Tensor | float = 1.0


def follow_gradient(loss: Tensor) -> Tensor:
    """Returns a step's loss, whose gradient in backward scales the attached losses.

    Args:
        loss: Scalar that `training_step` returns, before accumulation and loss scaling.
    """
    if loss.requires_grad:
        loss.register_hook(set_scale)
    return loss


def set_scale(scale: Tensor | float) -> None:
    """Sets the scale of attached losses, where a schedule runs backward without a step's loss.

    Args:
        scale: Gradient of the mean over a step's micro-batches, divided by their number.
    """
    _Scale.value = scale.detach() if isinstance(scale, Tensor) else scale


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.like) * _Scale.value


def attach_loss(tensor: Tensor, loss: Tensor) -> Tensor:
    """Returns a tensor unchanged; its backward adds the gradients of a loss.

    Args:
        tensor: Tensor on the way to the step's loss.
        loss: Scalar.
    """
    attached = _Attach.apply(tensor, loss)
    assert isinstance(attached, Tensor)
    return attached


class _Current:
    """Micro-batch of the forward or backward that runs now."""

    key: Hashable | None = None
    recomputes: bool = False


@contextlib.contextmanager
def in_micro_batch(key: Hashable, recomputes: bool = False) -> Iterator[None]:
    """Context of one forward or backward of a micro-batch, where a schedule interleaves those of several.

    Args:
        key: Key of the micro-batch, which no other one of the run has.
        recomputes: Whether routers have seen the tokens of this forward before.
    """
    before = _Current.key, _Current.recomputes
    _Current.key, _Current.recomputes = key, recomputes
    try:
        yield
    finally:
        _Current.key, _Current.recomputes = before


def is_recomputed() -> bool:
    """Returns whether the current forward is a recomputation, whose tokens have been counted."""
    return _Current.recomputes or in_backward()


class RouterCounts:
    """Choices of one router in the micro-batches of an optimizer step so far, of all ranks."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._named: dict[Hashable, Tensor] = {}
        self._before: dict[Hashable, Tensor] = {}  # Of the step before, whose backwards some schedules run in this one.
        self._unnamed: list[Tensor] = []

    def add(self, counts: Tensor) -> Tensor:
        """Adds the counts of a forward; returns those of the step so far.

        Args:
            counts: Choices of each expert, `[E]`, of all ranks.
        """
        self._total = counts if self._total is None else self._total + counts
        if _Current.key is None:
            self._unnamed.append(self._total)
        else:
            self._named[_Current.key] = self._total
        return self._total

    def recall(self) -> Tensor:
        """Returns what :meth:`add` has returned in the forward that is recomputed now."""
        if _Current.key is not None:
            counts = self._named.get(_Current.key, self._before.get(_Current.key))
        else:
            # Backward recomputes the calls of a router in reverse order.
            counts = self._unnamed.pop() if self._unnamed else self._total
        assert counts is not None
        return counts

    def end_step(self) -> None:
        """Begins the next optimizer step."""
        self._total, self._unnamed = None, []
        self._before, self._named = self._named, {}
