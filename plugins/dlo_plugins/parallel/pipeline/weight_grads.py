"""Backward in two parts: input gradients first, the weight gradients of dense and convolutional layers later.

Zero Bubble Pipeline Parallelism. Qi, Wan, Huang & Lin, 2024, arXiv 2401.10241: the previous stage waits only for the
input gradient; a rank can compute weight gradients whenever it would otherwise wait.

Departures: only layers whose weight gradient is a matrix product or a convolution of its own are deferred, which is
nearly all of the work. The weight gradients of norms, embeddings and separate biases are computed with the input
gradient. A deferred weight gradient keeps the layer's input and its output's gradient in memory.

Exact: the same operations in the same dtypes as autograd's, in another order of layers. It works in recomputed blocks
and under autocast. There, autograd sums several uses of a weight in the low precision; here they are summed in the
weight's own dtype. With FSDP2, the gradients of a block are complete only after its last weight gradient: the
reduction waits for that, and parameters must stay gathered between the two parts. Layers
that torch.compile has compiled are not changed: their full backward is computed with the input gradient.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_framework.fake_kernels import TensorPlace, tensor_places, tensors_replaced
from dlo_framework.models.autocast import autocast_dtype, no_autocast


class WeightGradients:
    """Deferred weight gradients of a model's layers.

    Attributes:
        deferred: Queue to which layers in backward add their weight gradients; None while nothing is deferred.
    """

    def __init__(self) -> None:
        self.deferred: deque[Callable[[], None]] | None = None

    def install(self, module: nn.Module) -> int:
        """Makes a module's dense and convolutional layers defer their weight gradients; returns the number of layers.

        Args:
            module: Block of the model. Layers of other classes, or with a forward of their own, are not changed.
        """
        count = 0
        for layer in _not_compiled(module):
            operation = _operation(layer)
            if operation is None or "forward" in layer.__dict__:
                continue
            # A method bound to the layer: a deep copy (for example of an averaged model) binds it to the copied layer.
            layer.forward = MethodType(_Forward(self, operation), layer)
            count += 1
        return count

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradients:
        return self


class _Forward:
    """Forward of a layer whose weight gradients can be deferred."""

    __name__ = "forward"  # A bound method is pickled by its name.

    def __init__(self, store: WeightGradients, operation: _Dense) -> None:
        self.store, self.operation = store, operation

    def __call__(self, layer: Any, input: Tensor) -> Tensor:
        weight = layer.weight
        if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
            return self.operation.forward(layer, input, weight, layer.bias)
        dtype = autocast_dtype(input.device.type)
        if dtype is not None and input.is_floating_point():
            # As autocast does; inside a Function, autocast would cache a cast that has no gradient.
            input = input.to(dtype)
        # A weight in the graph would get None in the first part of backward, and so would the hooks on it.
        in_graph = (None, None) if input.requires_grad else (weight, layer.bias)
        result: Tensor = _Layer.apply(input, *in_graph, layer, self)
        return result


class _Dense:
    """Forward of `nn.Linear`, with weight `[out, in]`, and the two parts of its backward, as pure functions."""

    def forward(self, layer: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def input_gradient(self, layer: Any, gradient: Tensor, shape: torch.Size, weight: Tensor) -> Tensor:
        return gradient @ weight

    def weight_gradients(
        self, layer: Any, gradient: Tensor, input: Tensor, weight: Tensor, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = gradient.reshape(-1, gradient.shape[-1])
        return rows.t() @ input.reshape(-1, input.shape[-1]), rows.sum(0) if bias else None


class _Transposed(_Dense):
    """transformers' `Conv1D`: weight `[in, out]`."""

    def forward(self, layer: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        rows = torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight)
        return rows.view(*input.shape[:-1], weight.shape[1])

    def input_gradient(self, layer: Any, gradient: Tensor, shape: torch.Size, weight: Tensor) -> Tensor:
        return gradient @ weight.t()

    def weight_gradients(
        self, layer: Any, gradient: Tensor, input: Tensor, weight: Tensor, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = gradient.reshape(-1, gradient.shape[-1])
        return input.reshape(-1, input.shape[-1]).t() @ rows, rows.sum(0)


class _Convolution(_Dense):
    """`nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`."""

    def forward(self, layer: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = layer._conv_forward(input, weight, bias)
        return result

    def input_gradient(self, layer: Any, gradient: Tensor, shape: torch.Size, weight: Tensor) -> Tensor:
        return self._backward(layer, gradient, gradient.new_empty(1).expand(shape), weight, (True, False, False))[0]

    def weight_gradients(
        self, layer: Any, gradient: Tensor, input: Tensor, weight: Tensor, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        return self._backward(layer, gradient, input, weight, (False, True, bias))[1:]

    @staticmethod
    def _backward(layer: Any, gradient: Tensor, input: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Any:
        zeros = [0] * (weight.ndim - 2)
        return torch.ops.aten.convolution_backward(
            gradient, input, weight, [weight.shape[0]] if layer.bias is not None else None, layer.stride, layer.padding,
            layer.dilation, False, zeros, layer.groups, wanted,
        )  # fmt: skip


class _Layer(torch.autograd.Function):
    """Layer whose weight gradients are computed in backward, or deferred if :attr:`WeightGradients.deferred` is set."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, layer: Any, caller: _Forward
    ) -> Tensor:
        """Computes the layer in the input's dtype; `weight` and `bias` are None where the graph is not to have them."""
        ctx.save_for_backward(input)
        weight, bias = layer.weight, layer.bias
        # Not among the saved tensors: recomputation would return copies, and these are the leaves.
        ctx.weight, ctx.bias, ctx.layer, ctx.caller = weight, bias, layer, caller
        with no_autocast(input.device.type):
            cast = None if bias is None else bias.to(input.dtype)
            return caller.operation.forward(layer, input, weight.to(input.dtype), cast)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Computes the input gradient, and the weight gradients unless they are deferred."""
        # Detached: a deferred weight gradient would keep the graph before it alive.
        input = ctx.saved_tensors[0].detach()
        weight, bias, layer, operation = ctx.weight, ctx.bias, ctx.layer, ctx.caller.operation
        low = weight.detach().to(input.dtype)
        of_input = operation.input_gradient(layer, gradient, input.shape, low) if ctx.needs_input_grad[0] else None
        with_bias = bias is not None and bias.requires_grad

        def of_weights() -> tuple[Tensor, Tensor | None]:
            return operation.weight_gradients(layer, gradient, input, low, with_bias)

        if ctx.needs_input_grad[1]:  # No stage waits for an input gradient.
            return of_input, *_as_parameters(of_weights(), weight, bias), None, None

        def add() -> None:
            all_pairs = zip((weight, bias), _as_parameters(of_weights(), weight, bias), strict=True)
            pairs = [(parameter, value) for parameter, value in all_pairs if value is not None]
            # Through the leaves' own accumulation, so that their hooks run.
            torch.autograd.backward([parameter for parameter, _ in pairs], [value for _, value in pairs])

        deferred = ctx.caller.store.deferred
        if deferred is None:
            add()
        else:
            deferred.append(add)
        return of_input, None, None, None, None


def _as_parameters(
    gradients: tuple[Tensor, Tensor | None], weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    of_weight, of_bias = gradients
    return of_weight.to(weight.dtype), None if of_bias is None or bias is None else of_bias.to(bias.dtype)


def _operation(layer: nn.Module) -> _Dense | None:
    # A class that is combined with another may declare by `computes_as` the class whose computation it has.
    if getattr(type(layer), "computes_as", type(layer)) is nn.Linear:
        return _Dense()
    if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return _Convolution() if plain else None
    if f"{type(layer).__module__}.{type(layer).__name__}" == "transformers.pytorch_utils.Conv1D":
        return _Transposed()
    return None


def _not_compiled(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and the modules inside it, without those that torch.compile has compiled."""
    if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
        return
    yield module
    for child in module.children():
        yield from _not_compiled(child)


class WeightVersion:
    """Copy of a rank's trainable parameters, with gradients of its own.

    Args:
        model: Model that has been cut into stages; None for a version that only keeps gradients.
        holds: Predicate for the names of this rank's parameters.
    """

    def __init__(self, model: nn.Module | None = None, holds: Callable[[str], bool] = bool) -> None:
        self._copies: dict[str, nn.Parameter] = {}
        self._places: list[TensorPlace] = []
        self._gradients: dict[str, Tensor] = {}
        if model is None:
            return
        copies: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and holds(name):
                copy = copies[id(parameter)] = self._copies[name] = nn.Parameter(parameter.detach().clone())
                copy.grad_dtype = parameter.grad_dtype
        self._places = [(at, key, copies[id(old)]) for at, key, old in tensor_places(model) if id(old) in copies]

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """Makes the model compute with the copy inside the block."""
        return tensors_replaced(self._places)

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Gives the copy the gradients of earlier micro-batches, to which backward adds those of its own."""
        for name, gradient in gradients.items():
            if name in self._copies:
                self._copies[name].grad = gradient
            else:
                self._gradients[name] = gradient

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter name."""
        of_copies = {name: copy.grad for name, copy in self._copies.items() if copy.grad is not None}
        return {**self._gradients, **of_copies}


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of a model's parameters by name, and removes them from the parameters."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name], parameter.grad = parameter.grad, None
    return gradients


def set_gradients(model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Sets the gradients of a model's parameters by name; parameters that are not named have none."""
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
