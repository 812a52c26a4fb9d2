"""Second version of a stage's weights, for micro-batches whose backward runs after the optimizer's next step.

Memory-Efficient Pipeline-Parallel DNN Training. Narayanan et al., 2021, arXiv 2006.09503: PipeDream-2BW keeps two
versions of the weights, and computes W(t+1) = W(t) - lr * gradient(W(t-1)).

The parameters are the version that optimizers step, in place. Only the micro-batches that are in flight when they do so
use a copy: it is made before the first of their forwards, and freed after the last of their backwards. The last stage,
which has no micro-batch in flight then, has no copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from dlo_framework.fake_kernels import TensorPlace, tensor_places, tensors_replaced


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
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found


def set_gradients(model: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Sets the gradients of a model's parameters by name; parameters that are not named have none."""
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)
