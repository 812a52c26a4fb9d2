"""Overlap of the all-reduce of the input gradient with the weight gradients of column projections.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053, whose code overlaps layer by layer. Departure: projections that share an input, such as queries, keys
and values, also share one all-reduce, which starts after the last of them.

The activations enter together with the projections' weights (:func:`enter`). A projection's backward computes only the
input gradient, and defers the weight gradient. The backward of the entry, which autograd calls after all of them,
starts the all-reduce, computes the weight gradients, and waits. All products and dtypes are those of autograd.
torch.compile gets the plain form, as it schedules the operations itself.
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
class _Deferred:
    """Weight gradients that projections defer to the entry's backward: each with the projection's number."""

    products: list[tuple[int, Callable[[], Tensor]]] = field(default_factory=list)


@dataclass(frozen=True)
class EnteredWeight:
    """Weight of a projection that has entered with the activations.

    Attributes:
        view: View of the weight, after the entry in the graph.
        number: Number of the projection in its region.
        deferred: Weight gradients of the region.
    """

    view: Tensor
    number: int
    deferred: _Deferred


def can_defer(column: nn.Linear, x: Tensor) -> bool:
    """Returns whether a projection's weight gradient can be deferred: it has one, and its own forward computes it."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x.requires_grad:
        return False
    return column.weight.requires_grad and "forward" not in column.__dict__


def enter(
    x: Tensor, columns: Sequence[nn.Linear], communicator: Communicator
) -> tuple[Tensor, dict[nn.Module, EnteredWeight]]:
    """Enters a region with activations and the weights of the projections that use them.

    Args:
        x: Activations, the same on all ranks.
        columns: Column projections that use them.
        communicator: Communicator of the axis.

    Returns:
        The activations, and each projection's weight.
    """
    deferred = _Deferred()
    entered, *views = _Enter.apply(x, communicator, deferred, *(column.weight for column in columns))
    pairs = zip(columns, views, strict=True)
    return entered, {column: EnteredWeight(view, number, deferred) for number, (column, view) in enumerate(pairs)}


def project(x: Tensor, weight: EnteredWeight, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight.T + bias`, in autocast's dtype if it is on."""
    device = x.device.type
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if is_on and x.dtype != torch.float64:  # Autocast does not cast float64.
        x = x.to(torch.get_autocast_dtype(device))
    found: Tensor = _Project.apply(x, weight.view, bias, weight.number, weight.deferred)
    return found


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, deferred: _Deferred, *weights: Tensor) -> Any:
        ctx.communicator, ctx.deferred = communicator, deferred
        ctx.set_materialize_grads(False)
        return x.view_as(x), *(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_input, *of_weights = grads
        wait = None if of_input is None else ctx.communicator.start_all_reduce(of_input)
        products, ctx.deferred.products = ctx.deferred.products, []
        for number, product in products:
            found, known = product(), of_weights[number]
            of_weights[number] = found if known is None else known + found
        return None if wait is None else wait(), None, None, *of_weights


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: int, deferred: _Deferred) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.number, ctx.deferred = number, deferred
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight, bias)  # Autocast casts weight and bias if it is on.

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0]
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        rows, dtype = grad.reshape(-1, grad.shape[-1]), weight.dtype
        ctx.deferred.products.append((ctx.number, lambda: (rows.t() @ x.reshape(-1, x.shape[-1])).to(dtype)))
        with_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        return grad @ weight.to(grad.dtype), None, rows.sum(0).to(ctx.bias_dtype) if with_bias else None, None, None
