"""Overlap of the collectives of column projections' backward with matrix products.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053. Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022,
arXiv 2205.05198, section 4.2.2. Their code overlaps layer by layer. Departure: projections that share an input, such as
queries, keys and values, also share its collectives, so the input gradient is sent after the last of them.

Without sequence parallelism, the all-reduce of the input gradient overlaps with the weight gradients. With it, forward
saves only this rank's tokens, and backward has two collectives: an all-gather of the input overlaps with the input
gradient, and the reduce-scatter of the input gradient overlaps with the weight gradients.

The activations enter together with the projections' weights (:func:`enter`, :func:`enter_gathered`). A projection's
backward computes only the input gradient, and defers the weight gradient to the backward of the entry, which autograd
calls after all of them. All products and dtypes are those of autograd. torch.compile gets the plain form, as it
schedules the operations itself.

Shapes: B samples, L tokens, D width, l = ceil(L / T) tokens of one of T ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.tensor.async_products import product_dtype
from dlo_plugins.tensor.collectives import owned, start_gather, start_scatter


@dataclass
class _Deferred:
    """Weight gradients that projections defer to the entry's backward.

    Attributes:
        products: Functions that compute weight gradients, each with the projection's number.
        wait_for_input: Function that waits for the all-gather of the input; None before its start.
    """

    products: list[tuple[int, Callable[[], Tensor]]] = field(default_factory=list)
    wait_for_input: Callable[[], Tensor] | None = None
    _input: Tensor | None = None

    def input(self) -> Tensor:
        """Returns the gathered input, [B, L, D]."""
        if self._input is None:
            assert self.wait_for_input is not None
            self._input = self.wait_for_input()
        return self._input

    def reset(self) -> None:
        """Clears the state after a backward pass."""
        self.products, self.wait_for_input, self._input = [], None, None


@dataclass(frozen=True)
class _Gathering:
    """Arguments of the all-gather of the input in backward.

    Attributes:
        part: Tokens of this rank, [B, l, D], detached.
        length: Number of tokens of all ranks, L.
        communicator: Ranks that share the tokens.
    """

    part: Tensor
    length: int
    communicator: Communicator


@dataclass(frozen=True)
class EnteredWeight:
    """Weight of a projection that has entered with the activations.

    Attributes:
        view: View of the weight, after the entry in the graph.
        number: Number of the projection in its region.
        deferred: Weight gradients of the region.
        gathering: All-gather of the input in backward; None if forward saves the input.
    """

    view: Tensor
    number: int
    deferred: _Deferred
    gathering: _Gathering | None = None


def can_defer(column: nn.Linear, x: Tensor) -> bool:
    """Returns whether a projection's weight gradient can wait: it has one, and nobody else computes the layer."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not x.requires_grad:
        return False
    return column.weight.requires_grad and "forward" not in column.__dict__


def enter(
    x: Tensor, columns: Sequence[nn.Linear], communicator: Communicator
) -> tuple[Tensor, dict[nn.Module, EnteredWeight]]:
    """Takes activations in with the weights of the projections that they are for.

    Args:
        x: The activations, the same on all ranks.
        columns: The projections.
        communicator: The ranks.

    Returns:
        The activations, and each projection's weight.
    """
    deferred = _Deferred()
    entered, *views = _Enter.apply(x, communicator, deferred, *(column.weight for column in columns))
    pairs = zip(columns, views, strict=True)
    return entered, {column: EnteredWeight(view, number, deferred) for number, (column, view) in enumerate(pairs)}


def enter_gathered(
    part: Tensor, length: int, columns: Sequence[nn.Linear], communicator: Communicator
) -> tuple[Tensor, dict[nn.Module, EnteredWeight]]:
    """Gathers activations, and takes them in with the weights of the projections that they are for.

    Args:
        part: This rank's tokens, [B, l, D].
        length: Tokens of all ranks, L.
        columns: The projections.
        communicator: The ranks.

    Returns:
        The activations of all tokens, [B, L, D], and each projection's weight.
    """
    deferred = _Deferred()
    weights = (column.weight for column in columns)
    entered, *views = _EnterGathered.apply(part, length, communicator, deferred, *weights)
    gathering = _Gathering(part.detach(), length, communicator)
    pairs = zip(columns, views, strict=True)
    return entered, {
        column: EnteredWeight(view, number, deferred, gathering) for number, (column, view) in enumerate(pairs)
    }


def project(x: Tensor, weight: EnteredWeight, bias: Tensor | None) -> Tensor:
    """Returns `x @ weight.T + bias`, in autocast's dtype where it is on."""
    x = x.to(product_dtype(x))
    if weight.gathering is None:
        found: Tensor = _Project.apply(x, weight.view, bias, weight.number, weight.deferred)
        return found
    part, length, communicator = weight.gathering.part, weight.gathering.length, weight.gathering.communicator
    found = _ProjectGathered.apply(x, part, weight.view, bias, weight.number, weight.deferred, length, communicator)
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
        _add_products(ctx.deferred, of_weights)
        return None if wait is None else wait(), None, None, *of_weights


class _EnterGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, length: int, communicator: Communicator, deferred: _Deferred, *weights: Tensor
    ) -> Any:
        ctx.communicator, ctx.deferred = communicator, deferred
        ctx.set_materialize_grads(False)
        whole = owned(start_gather(part, length, communicator)())
        return whole, *(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_input, *of_weights = grads
        wait = None if of_input is None else start_scatter(of_input, ctx.communicator)
        _add_products(ctx.deferred, of_weights)
        return None if wait is None else wait(), None, None, None, *of_weights


def _add_products(deferred: _Deferred, of_weights: list[Any]) -> None:
    """Computes deferred weight gradients, and adds them to the gradients from other uses of the weights."""
    try:
        for number, product in deferred.products:
            found, known = product(), of_weights[number]
            of_weights[number] = found if known is None else known + found
    finally:
        deferred.reset()


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: int, deferred: _Deferred) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.number, ctx.deferred = number, deferred
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight, bias)  # Autocast casts weight and bias if it is on.

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        return *_backward(ctx, grads[0], weight, lambda: x, ctx.needs_input_grad[2]), None, None


class _ProjectGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        part: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        number: int,
        deferred: _Deferred,
        length: int,
        communicator: Communicator,
    ) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.number, ctx.deferred, ctx.length, ctx.communicator = number, deferred, length, communicator
        ctx.dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return F.linear(x, weight, bias)  # Autocast casts weight and bias if it is on.

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        part, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        deferred = ctx.deferred
        if deferred.wait_for_input is None:
            deferred.wait_for_input = start_gather(part.to(ctx.dtype), ctx.length, ctx.communicator)
        of_x, *others = _backward(ctx, grads[0], weight, deferred.input, ctx.needs_input_grad[3])
        return of_x, None, *others, None, None, None, None


def _backward(
    ctx: Any, grad: Tensor, weight: Tensor, get_input: Callable[[], Tensor], needs_bias: bool
) -> tuple[Tensor, None, Tensor | None]:
    """Returns the gradients of a projection's input and bias, and None for its weight, whose product it defers."""
    rows, dtype = grad.reshape(-1, grad.shape[-1]), weight.dtype

    def product() -> Tensor:
        x = get_input()
        return (rows.t() @ x.reshape(-1, x.shape[-1])).to(dtype)

    ctx.deferred.products.append((ctx.number, product))
    with_bias = ctx.bias_dtype is not None and needs_bias
    return grad @ weight.to(grad.dtype), None, rows.sum(0).to(ctx.bias_dtype) if with_bias else None
