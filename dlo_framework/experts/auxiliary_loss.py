"""Losses that are computed inside a model, and whose gradients join those of the step's loss in backward.

:func:`attach_loss` leaves a tensor unchanged, and adds the gradient of a second loss in backward, as in Megatron. So
the loss needs no way out of the model: it works inside pipeline stages, recomputed blocks and sharded units. It is
scaled like the step's loss, by accumulation, by loss scaling and by a pipeline's micro-batches:
:func:`follow_gradient` sets the scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Scale:
    """Gradient of the step's loss in the current backward: 1 in a plain loop."""

    value: Tensor | float = 1.0


_SCALE = _Scale()


def follow_gradient(loss: Tensor) -> Tensor:
    """Returns a step's loss, whose gradient in backward scales the attached losses.

    Args:
        loss: Scalar that `training_step` returns, before accumulation and loss scaling.
    """
    if loss.requires_grad:
        loss.register_hook(_follow)
    return loss


def _follow(gradient: Tensor) -> None:
    _SCALE.value = gradient.detach()


def set_scale(scale: Tensor | float) -> None:
    """Sets the scale of attached losses, where a schedule runs backward without a step's loss.

    Args:
        scale: Gradient of the mean over a step's micro-batches, divided by their number.
    """
    _SCALE.value = scale.detach() if isinstance(scale, Tensor) else scale


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.detach()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.like) * _SCALE.value


def attach_loss(tensor: Tensor, loss: Tensor) -> Tensor:
    """Returns a tensor unchanged; its backward adds the gradients of a loss.

    Args:
        tensor: Tensor on the way to the step's loss.
        loss: Scalar.
    """
    found = _Attach.apply(tensor, loss)
    assert isinstance(found, Tensor)
    return found
