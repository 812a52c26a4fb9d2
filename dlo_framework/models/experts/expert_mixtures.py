"""Finds the mixtures of experts of a model by their form, whatever library the model is from.

A mixture is a module with a router, which chooses `top_k` of `E` experts for each token, and with its experts. Three
forms exist:

* `routed`: one module with stacked parameters `[E, ...]`, called with `(tokens [T, D], index [T, k], weights [T, k])`,
  which returns `[T, D]`. transformers 5 has nearly all its families in this form.
* `dense`: stacked parameters too, called with a copy of all tokens for each expert, `[E * T, D]` (Llama 4).
* `list`: a `ModuleList` or `ModuleDict` of `E` modules of one class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan

Form = Literal["routed", "dense", "list"]

#: Attributes of a module of experts, or of a router, that hold the number of experts.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: Attributes of a router, or of a mixture, that hold the number of experts of a token.
_TOP_K = ("top_k", "num_experts_per_tok", "moe_top_k", "moe_k", "topk")
#: Names of routers, most usual first; other names are found by a weight `[E, D]`.
_ROUTERS = ("gate", "router", "moe_gate", "gating")


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts in a model. Names are relative to the model.

    Attributes:
        name: Name of the module that holds router and experts.
        experts: Name of the module with the experts.
        router: Name of the router; None for one without a module of its own.
        count: Number of experts, `E`.
        top_k: Number of experts of a token; None if no attribute has it.
        form: Form of the experts: `routed`, `dense` or `list`.
        stacked: Dimension of the experts of each stacked parameter, by its full name; empty for a `list`. Where a
            dimension joins experts and features, as in DBRX, its size is a multiple of `E`.
        shared: Names of the shared experts, which each token passes.
    """

    name: str
    experts: str
    router: str | None
    count: int
    top_k: int | None
    form: Form
    stacked: Mapping[str, int] = field(default_factory=dict, hash=False)
    shared: tuple[str, ...] = ()

    @property
    def is_stacked(self) -> bool:
        """Whether the experts' parameters are stacked in tensors of all experts."""
        return bool(self.stacked)

    def active_fraction(self) -> float:
        """Returns the fraction of the experts' parameters that a token uses; 1 if `top_k` is not known."""
        return 1.0 if self.top_k is None else min(1.0, self.top_k / self.count)

    def count_parameters(self, model: nn.Module) -> int:
        """Returns the number of parameters of all experts, in a model that is not cut."""
        return sum(parameter.numel() for parameter in model.get_submodule(self.experts).parameters())

    def count_active(self, model: nn.Module) -> int:
        """Returns the number of the experts' parameters that a token uses, in a model that is not cut."""
        return round(self.count_parameters(model) * self.active_fraction())


def find_mixtures(model: nn.Module, plan: ParallelPlan | None = None) -> list[Mixture]:
    """Returns the mixtures of a model, in the order in which it registers them.

    Args:
        model: Model, on any device; the meta device will do.
        plan: Plan whose `experts` name the mixtures; None, or a plan without them, finds all by their form.

    Raises:
        DloError: A pattern of `experts` matches no mixture.
    """
    mixtures = list(_all_mixtures(model))
    if plan is None or not plan.experts:
        return mixtures
    chosen = []
    for pattern in plan.experts:
        names = set(ParallelPlan(experts=(pattern,)).expert_names(model))
        matched = [mixture for mixture in mixtures if mixture.name in names]
        if not matched:
            known = ", ".join(dict.fromkeys(mixture.name for mixture in mixtures[:3])) or "none of this model"
            raise DloError(
                f"experts must match modules with a router and experts, got '{pattern}', which matches none; use the"
                f" name of a mixture ({known}), or remove it"
            )
        chosen += matched
    return [mixture for mixture in mixtures if mixture in chosen]


def _all_mixtures(model: nn.Module) -> Iterator[Mixture]:
    modules = dict(model.named_modules())
    experts = ""
    for name, module in modules.items():
        if not name or (experts and name.startswith(f"{experts}.")):  # A part of experts, such as DBRX's projections.
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            mixture = _list_mixture(name, module, modules)
        else:
            mixture = _stacked_mixture(name, module, modules)
        if mixture is not None:
            experts = mixture.experts
            yield mixture


def _stacked_mixture(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> Mixture | None:
    """Returns the mixture whose stacked experts a module is; None for any other module."""
    count = count_experts(module)
    if count is None or count < 2:
        return None
    parameters = dict(module.named_parameters(name))
    if any(parameter.ndim >= 3 and parameter.shape[0] == count for parameter in parameters.values()):
        stacked = {key: 0 for key, parameter in parameters.items() if parameter.shape[:1] == (count,)}
    elif all(parameter.ndim == 2 and parameter.shape[0] % count == 0 for parameter in parameters.values()):
        stacked = dict.fromkeys(parameters, 0)  # DBRX joins experts and features.
    else:
        return None
    form = _form(module)
    if form is None or not stacked:
        return None
    return _mixture(name, count, form, stacked, modules)


def _form(module: nn.Module) -> Form | None:
    """Returns the form of a module with stacked experts by its forward; None for a router or one linear layer."""
    parameters = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(parameters) >= 3:
        return "routed"
    own = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim >= 3]
    return "dense" if len(parameters) == 1 and len(own) >= 2 else None


def _list_mixture(
    name: str, experts: nn.ModuleList | nn.ModuleDict, modules: Mapping[str, nn.Module]
) -> Mixture | None:
    """Returns the mixture whose experts a list is; None for any other list, such as the blocks."""
    members = list(experts.children())
    parent = name.rpartition(".")[0]
    if len(members) < 2 or len({type(member) for member in members}) > 1 or "expert" not in name.rpartition(".")[2]:
        return None
    if next(members[0].parameters(), None) is None or _router(parent, name, len(members), modules) is None:
        return None
    return _mixture(name, len(members), "list", {}, modules)


def _mixture(
    experts: str, count: int, form: Form, stacked: Mapping[str, int], modules: Mapping[str, nn.Module]
) -> Mixture | None:
    """Returns the mixture around experts: the nearest module that holds a router too."""
    around = experts.rpartition(".")[0]
    router = _router(around, experts, count, modules)
    holder = modules[around]
    asked = [holder, *([modules[router], *modules[router].children()] if router else [])]
    top_k = next((own_top_k for module in asked if (own_top_k := _attribute(module, _TOP_K)) is not None), None)
    config = getattr(holder, "config", None)
    if top_k is None and config is not None:
        top_k = _attribute(config, _TOP_K)
    shared = tuple(
        f"{around}.{child}"
        for child, module in holder.named_children()
        if "shared" in child and "gate" not in child and next(module.parameters(), None) is not None
    )
    return Mixture(around, experts, router, count, top_k, form, stacked, shared)


def _router(around: str, experts: str, count: int, modules: Mapping[str, nn.Module]) -> str | None:
    """Returns the name of the module beside the experts whose weight has one row for each of them."""
    children = [f"{around}.{child}" if around else child for child, _ in modules[around].named_children()]
    beside = [name for name in children if name != experts and "shared" not in name]
    named = [name for key in _ROUTERS for name in beside if name.rpartition(".")[2] == key]
    scoring = (
        name
        for name in [*named, *beside]
        for part in (modules[name], *modules[name].children())  # DBRX's router holds a linear layer.
        if any(one.ndim == 2 and one.shape[0] == count for one in part.parameters(recurse=False))
    )
    return next(scoring, next(iter(named), None))


def count_experts(module: object) -> int | None:
    """Returns the number of experts of a module of experts, or of a router, by its attribute; None without one."""
    return _attribute(module, COUNTS)


def _attribute(holder: object, names: Iterable[str]) -> int | None:
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
