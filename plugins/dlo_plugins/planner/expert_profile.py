"""Finds what expert parallelism divides in a model, and the bytes that its mixtures exchange in a forward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.experts import Mixture, find_mixtures
from dlo_framework.plan import ParallelPlan
from dlo_plugins.experts.local_experts import divisible_mixtures


class ExpertProfile:
    """Mixtures of a model, and what `ep` makes of them.

    Args:
        model: Model, on any device.
        plan: Plan of the model; None divides nothing.

    Attributes:
        sizes: Sizes of the axis `ep` that divide the experts.
        names: Names of the parameters that it divides.
        parameters: Ids of these parameters.
        why_not: Reason why they cannot be divided, under the key `ep`.
    """

    def __init__(self, model: nn.Module, plan: ParallelPlan | None) -> None:
        self._model = model
        self.sizes: tuple[int, ...] = (1,)
        self.why_not: dict[str, str] = {}
        self._mixtures: list[Mixture] = []
        self._exchanged: dict[str, float] = {}
        found = [] if plan is None else find_mixtures(model, plan)
        if plan is not None and found:
            common = math.gcd(*(mixture.count for mixture in found))
            try:
                self._mixtures = divisible_mixtures(model, plan, common)
                self.sizes = tuple(n for n in range(1, common + 1) if common % n == 0)
            except DloError as error:
                self.why_not["ep"] = str(error)
        self.names = {name for mixture in self._mixtures for name in mixture.stacked}
        self.parameters = {id(model.get_parameter(name)) for name in self.names}

    def exchanged_in(self, name: str) -> float:
        """Returns the bytes that the mixtures of a module exchange in a forward, as its last call has shown."""
        return sum(size for experts, size in self._exchanged.items() if experts.startswith(f"{name}."))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Counts the tokens of each call of the experts inside the block."""

        def count(mixture: Mixture, module: nn.Module, args: Any, kwargs: Any) -> None:
            self._exchanged[mixture.experts] = _exchanged(mixture, module, [*args, *kwargs.values()])

        handles = [
            self._model.get_submodule(mixture.experts).register_forward_pre_hook(
                lambda module, args, kwargs, mixture=mixture: count(mixture, module, args, kwargs), with_kwargs=True
            )
            for mixture in self._mixtures
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _exchanged(mixture: Mixture, module: nn.Module, given: list[Any]) -> float:
    """Returns the bytes of a mixture's tokens on their way to experts, and of the outputs on their way back.

    Args:
        mixture: Mixture.
        module: Module of its experts.
        given: Arguments of the call: tokens, and under `routed` the experts of each.
    """
    tokens = next(value for value in given if isinstance(value, Tensor))
    if mixture.form == "dense":  # A copy of each token for each expert, of which those of the chosen ones travel.
        choices = tokens.shape[0] / mixture.count * (mixture.top_k or mixture.count)
    else:
        choices = next(v.numel() for v in given if isinstance(v, Tensor) and not v.is_floating_point())
    size = tokens.element_size()
    # transformers adds biases in the tokens' dtype, which is single precision under autocast.
    returned = 4 if any(parameter.ndim < 3 for parameter in module.parameters(recurse=False)) else size
    return float(choices * tokens.shape[-1] * (size + returned))
