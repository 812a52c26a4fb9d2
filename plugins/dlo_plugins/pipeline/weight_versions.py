"""Second version of a stage's weights, for micro-batches whose backward runs after the optimizer's next step.

Memory-Efficient Pipeline-Parallel DNN Training. Narayanan et al., 2021, arXiv 2006.09503: PipeDream-2BW keeps two
versions of the weights, and computes W(t+1) = W(t) - lr * gradient(W(t-1)).

The parameters are the version that optimizers step, in place. Only the micro-batches that are in flight when they do so
use a copy: it is made before the first of their forwards, and freed after the last of their backwards. The last stage,
which has no micro-batch in flight then, has no copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn

#: Name of a parameter, the module that owns it, its name there, and the parameter.
Place = tuple[str, nn.Module, str, nn.Parameter]


def parameter_places(model: nn.Module, holds: Callable[[str], bool]) -> list[Place]:
    """Returns the places of a rank's trainable parameters; a shared one has several, all with its first name.

    Args:
        model: Model that has been cut into stages.
        holds: Predicate for the names of this rank's parameters.
    """
    names: dict[int, str] = {}
    found: list[Place] = []
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if parameter is not None and parameter.requires_grad and holds(name):
                found.append((names.setdefault(id(parameter), name), module, key, parameter))
    return found


class WeightVersion:
    """Copy of parameters, with gradients of its own.

    Args:
        places: Places of the parameters; none for a version that only keeps gradients.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._copies: dict[str, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._gradients: dict[str, Tensor] = {}
        for name, module, key, parameter in places:
            if name not in self._copies:
                self._copies[name] = nn.Parameter(parameter.detach().clone())
                self._copies[name].grad_dtype = parameter.grad_dtype
            self._places.append((module, key, self._copies[name]))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Makes the model compute with the copy inside the block."""
        before = [module._parameters[key] for module, key, _ in self._places]
        for module, key, copy in self._places:
            module._parameters[key] = copy
        try:
            yield
        finally:
            for (module, key, _), parameter in zip(self._places, before, strict=True):
                module._parameters[key] = parameter

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
