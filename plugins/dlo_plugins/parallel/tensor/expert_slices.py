"""Stacked experts under tensor parallelism: each rank has a slice of the hidden features of each expert.

Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism. Shoeybi et al., 2019,
arXiv 1909.08053, applied to each expert, as Megatron Core's expert tensor parallelism does. All ranks route the same
tokens the same way. A rank computes each token with its slice of the token's experts, and the ranks' weighted sums are
added. Tokens and weights enter, and the sum leaves, as at any other region: two all-reduces of `[T, D]` a mixture.

Shapes: T tokens, E experts, D features, H hidden features, k experts of a token.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.batches import tree_map
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.vocab_parallel import copy_in
from dlo_framework.errors import DloError
from dlo_framework.models.experts import find_mixtures
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.tensor.collectives import reduce_from_region
from dlo_plugins.parallel.tensor.tp_plan import Division, TPPlan

#: Names of the first projection of stacked experts, in transformers and in dlo, with its number of parts of size H.
_FIRST = {"gate_up_proj": 2, "up_proj": 1}
_LAST = "down_proj"


def divide_stacked_experts(tp_plan: TPPlan, module: nn.Module, plan: ParallelPlan) -> None:
    """Adds the divisions of the model's experts to a plan.

    Raises:
        DloError: Experts cannot be divided; each rank would have all of them.
    """
    for mixture in find_mixtures(module, plan):
        name, experts = mixture.experts, module.get_submodule(mixture.experts)
        own = [f"{name}.{key}" for key, _ in experts.named_parameters()]
        if any(key in tp_plan.divisions for key in own):
            continue  # A list of modules, whose projections have rules.
        divisions = _divide(name, experts) if mixture.is_stacked else None
        if divisions is None:
            raise DloError(
                "experts under tp must be stacked in gate_up_proj or up_proj and down_proj, or have tensor rules, got"
                f" {type(experts).__name__} '{name}'; set tp to 1"
            )
        if any(isinstance(part, nn.Dropout) and part.p > 0 for part in experts.modules()):
            raise DloError(
                f"experts under tp must have no dropout, got {type(experts).__name__} '{name}'; set dropout"
                " to 0, or tp to 1"
            )
        tp_plan.divisions |= {key: division for key, division in divisions.items() if key in own}
        if f"{name}.{_LAST}_bias" in own:
            tp_plan.partial.add(f"{name}.{_LAST}_bias")
        (hidden,) = divisions[f"{name}.{_LAST}"].pieces
        tp_plan.demand(name, hidden, "hidden features")
        tp_plan.experts.append(name)


def _divide(name: str, experts: nn.Module) -> dict[str, Division] | None:
    """Returns the divisions of stacked experts, as if they had biases; None if they are not two stacks of matrices.

    Args:
        name: Name of the module.
        experts: Full module, on any device.
    """
    own = dict(experts.named_parameters())
    first = next((key for key in _FIRST if key in own), None)
    if first is None or _LAST not in own or own.keys() - {first, _LAST, f"{first}_bias", f"{_LAST}_bias"}:
        return None
    up, down, parts = tuple(own[first].shape), tuple(own[_LAST].shape), _FIRST[first]
    if getattr(experts, "has_post_expert_norm", False) or len(up) != 3 or len(down) != 3:
        return None
    plain = up[2] == down[1] and up[1] == parts * down[2]
    transposed = up[1] == down[2] and up[2] == parts * down[1]
    if plain == transposed:  # Square matrices have both forms.
        stated = getattr(experts, "is_transposed", False if hasattr(experts, "compute_sorted") else None)
        if stated is None or not plain:
            return None
        transposed = stated
    hidden = down[1] if transposed else down[2]
    pieces = (hidden,) * parts if getattr(experts, "is_concatenated", True) else (parts * hidden,)
    return {
        f"{name}.{first}": Division(2 if transposed else 1, pieces),
        f"{name}.{first}_bias": Division(1, pieces),
        f"{name}.{_LAST}": Division(1 if transposed else 2, (hidden,)),
    }


class SlicedExperts:
    """Forward of experts of which this rank has a slice of the hidden features.

    The bias of the last projection is added by the first rank alone; on the others it is zero, and so is its gradient.

    Args:
        module: Module of the experts.
        compute: Forward of the module.
        communicator: Communicator of the tp axis.
    """

    def __init__(self, module: nn.Module, compute: Callable[..., Tensor], communicator: Communicator) -> None:
        self.module, self.compute, self.communicator = module, compute, communicator
        self.__signature__ = inspect.signature(compute)  # The form of a mixture is read from it.

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedExperts:
        return self  # A process group cannot be copied.

    def __call__(self, *routing: Any, **named: Any) -> Tensor:
        """Returns the sum of the ranks' outputs."""
        entered, keywords = tree_map(self._enter, (routing, named))
        with self._bias_once():
            partial = self.compute(*entered, **keywords)
        return reduce_from_region(partial, self.communicator)

    def wrap_compute(self, wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        """Wraps what is computed between entry and sum; expert parallelism does."""
        self.compute = wrap(self.compute)

    def _enter(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
            return copy_in(value, self.communicator)
        return value

    @contextlib.contextmanager
    def _bias_once(self) -> Iterator[None]:
        parameters: Any = self.module._parameters
        bias = parameters.get(f"{_LAST}_bias")
        if bias is None:
            yield
            return
        parameters[f"{_LAST}_bias"] = bias * float(self.communicator.rank == 0)
        try:
            yield
        finally:
            parameters[f"{_LAST}_bias"] = bias


def install_slices(experts: nn.Module, communicator: Communicator) -> None:
    """Makes a module of stacked experts, whose parameters are this rank's slices, sum over the ranks."""
    forward: Any = torch.compiler.disable(SlicedExperts(experts, experts.forward, communicator))
    experts.forward = forward
