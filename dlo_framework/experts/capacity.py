"""Capacity of the experts of mixtures whose routers are not dlo's, such as those of transformers.

GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding. Lepikhin et al., 2020,
arXiv 2006.16668. Departures: capacities are within a row (a sequence), and a token's choices are in the order of their
weights. So which choices are dropped depends neither on ranks nor on micro-batches.

Hooks of the modules do it, which names of parameters, copies and strategies leave alone. A dropped choice has the
weight 0 and the number of experts as its index, which expert parallelism does not send.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.experts.balance import find_routers, read_routing
from dlo_framework.experts.expert_mixtures import COUNTS, Mixture, find_mixtures
from dlo_framework.experts.routers import is_within_capacity

#: Attributes of a router: its number of experts, and the number of tokens in a row of its present input.
_EXPERTS, _ROW = "_dlo_experts", "_dlo_row"


def limit_capacity(model: nn.Module, factor: float) -> None:
    """Makes the routers of a model drop choices beyond a capacity in training, in place.

    Args:
        model: Full model, on any device; the meta device will do.
        factor: Bound of an expert's tokens within a row, as a multiple of an equal share.

    Raises:
        DloError: If the model has a mixture that cannot drop choices.
    """
    for mixture in _limited_mixtures(model, factor):
        holder, experts = model.get_submodule(mixture.name), model.get_submodule(mixture.experts)
        assert mixture.router is not None
        router: Any = model.get_submodule(mixture.router)
        router.capacity_factor = factor
        for module in (router, experts):
            setattr(module, _EXPERTS, mixture.count)
        holder._dlo_router = mixture.router.removeprefix(f"{mixture.name}.")  # type: ignore[assignment]
        holder.register_forward_pre_hook(_record_row, with_kwargs=True)
        router.register_forward_hook(_drop_choices)
        experts.register_forward_pre_hook(_clamp_indices, with_kwargs=True)


def _limited_mixtures(model: nn.Module, factor: float) -> list[Mixture]:
    found = find_mixtures(model)
    other = [mixture.name for mixture in found if mixture.form != "routed" or mixture.router is None]
    other += [name for name in find_routers(model) if name not in {mixture.router for mixture in found}]
    if other or not found:
        raise DloError(
            "experts.capacity_factor must be unset for mixtures other than a router and experts that are called with"
            f" tokens, indices and weights, got {factor} for '{next(iter(other), type(model).__name__)}'; remove it"
        )
    return found


@torch.compiler.disable
def _record_row(holder: nn.Module, args: Any, kwargs: Any) -> None:
    """Records the number of tokens in a row, which routers get flattened."""
    hidden = next((value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)), None)
    if hidden is None or hidden.ndim != 3:
        given = "none" if hidden is None else list(hidden.shape)
        raise DloError(
            "experts.capacity_factor must be unset for mixtures that are not called with hidden states [rows, tokens,"
            f" features], got {given} in {type(holder).__name__}; remove it"
        )
    router: Any = holder.get_submodule(holder._dlo_router)  # type: ignore[arg-type]
    setattr(router, _ROW, hidden.shape[1])


@torch.compiler.disable
def _drop_choices(router: Any, args: Any, output: Any) -> Any:
    """Returns the output of a router without the choices beyond the capacity, where it trains."""
    if not router.training:
        return None
    _, weights, indices = read_routing(type(router).__name__, router, output)
    row, experts, choices = getattr(router, _ROW), getattr(router, _EXPERTS), indices.shape[-1]
    if output[0].shape[-1] != experts:
        raise DloError(
            f"experts.capacity_factor must be unset for routers that choose among others than their {experts} experts,"
            f" got {output[0].shape[-1]} choices in {type(router).__name__}; remove it"
        )
    capacity = math.ceil(router.capacity_factor * row * choices / experts)
    order = weights.detach().sort(dim=-1, descending=True, stable=True).indices
    in_order = is_within_capacity(indices.gather(-1, order).view(-1, row, choices), capacity).reshape(order.shape)
    kept = torch.empty_like(in_order).scatter_(-1, order, in_order)
    return (output[0], weights * kept, indices.masked_fill(~kept, experts), *output[3:])


@torch.compiler.disable
def _clamp_indices(experts: nn.Module, args: Any, kwargs: Any) -> Any:
    """Returns the arguments of experts with indices that exist: a dropped choice has the weight 0.

    Expert parallelism, under which the module has some of the experts, leaves dropped choices out itself.
    """
    count = getattr(experts, _EXPERTS)
    own = next((getattr(experts, name) for name in COUNTS if isinstance(getattr(experts, name, None), int)), None)
    if own != count:
        return None

    def clamped(value: Any) -> Any:
        is_index = isinstance(value, Tensor) and not value.is_floating_point()
        return value.clamp(max=count - 1) if is_index else value

    return tuple(map(clamped, args)), {name: clamped(value) for name, value in kwargs.items()}
