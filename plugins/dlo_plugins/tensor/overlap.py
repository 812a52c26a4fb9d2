"""The sum of the input's gradient over the ranks, while the gradients of column projections' weights are computed.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053, whose code does it layer by layer. Departure: several projections that share an input, such as
queries, keys and values, share one all-reduce too, so it starts after the last of them.

The activations enter together with the projections' weights (:func:`enter`). A projection's backward computes the
input's gradient alone, and leaves what the weight's is computed of. Backward of the entry, which autograd calls after
all of them, starts the all-reduce, computes the weights' gradients, and waits. All are the same products in the same
dtypes as autograd's. torch.compile gets the plain form, whose schedule is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator


@dataclass
class _Left:
    """What projections' backward passes leave for that of the entry: by their number, functions of no arguments."""

    products: list[tuple[int, Callable[[], Tensor]]] = field(default_factory=list)


@dataclass(frozen=True)
class EnteredWeight:
    """A projection's weight, as it has entered with the activations.

    Attributes:
        view: of the weight, behind the entry in the graph.
        number: of the projection among those of its region.
        left: see :class:`_Left`.
    """

    view: Tensor
    number: int
    left: _Left


def suits(column: nn.Linear, x: Tensor) -> bool:
    """Returns whether a projection's weight gradient can wait: it has one, and nobody else computes the layer."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x.requires_grad:
        return False
    return column.weight.requires_grad and "forward" not in column.__dict__


def enter(
    x: Tensor, columns: Sequence[nn.Linear], communicator: Communicator
) -> tuple[Tensor, dict[nn.Module, EnteredWeight]]:
    """Takes activations in with the weights of the projections that they are for.

    Args:
        x: the activations, the same on all ranks.
        columns: the projections.
        communicator: the ranks.

    Returns:
        The activations, and each projection's weight.
    """
    left = _Left()
    entered, *views = _Enter.apply(x, communicator, left, *(column.weight for column in columns))
    pairs = zip(columns, views, strict=True)
    return entered, {column: EnteredWeight(view, number, left) for number, (column, view) in enumerate(pairs)}


def project(x: Tensor, weight: EnteredWeight, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight.T + bias`, in autocast's dtype where it is on."""
    device = x.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if is_on and x.dtype != torch.float64:  # Which autocast leaves alone.
        x = x.to(torch.get_autocast_dtype(device))
    found: Tensor = _Project.apply(x, weight.view, bias, weight.number, weight.left)
    return found


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, left: _Left, *weights: Tensor) -> Any:
        ctx.communicator, ctx.left = communicator, left
        ctx.set_materialize_grads(False)
        return x.view_as(x), *(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_input, *of_weights = grads
        wait = None if of_input is None else ctx.communicator.start_all_reduce(of_input)
        products, ctx.left.products = ctx.left.products, []
        for number, product in products:
            found, known = product(), of_weights[number]
            of_weights[number] = found if known is None else known + found
        return None if wait is None else wait(), None, None, *of_weights


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: int, left: _Left) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.number, ctx.left = number, left
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight, bias)  # Where autocast is on, it casts these two.

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        rows, dtype = grad.reshape(-1, grad.shape[-1]), weight.dtype
        ctx.left.products.append((ctx.number, lambda: (rows.t() @ x.reshape(-1, x.shape[-1])).to(dtype)))
        with_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        return grad @ weight.to(grad.dtype), None, rows.sum(0).to(ctx.bias_dtype) if with_bias else None, None, None
