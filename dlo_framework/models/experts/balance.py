"""Load, losses and capacity of the routers of a model: dlo's own, and those of transformers' mixtures.

Routers are watched by forward hooks, which a run without them does not have. Sums stay on the device; ranks add theirs
when they are read.

:func:`limit_capacity` drops choices of routers that are not dlo's. GShard: Scaling Giant Models with Conditional
Computation and Automatic Sharding. Lepikhin et al., 2020, arXiv 2006.16668. Departures: capacities are within a row (a
sequence), and a token's choices are in the order of their weights. So which choices are dropped depends neither on
ranks nor on micro-batches. Hooks of the modules do it, which names of parameters, copies and strategies leave alone. A
dropped choice has the weight 0 and the number of experts as its index, which expert parallelism does not send.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dlo_framework.batches import tree_map_only
from dlo_framework.callback import PluginCallback
from dlo_framework.errors import DloError
from dlo_framework.models.experts.auxiliary_loss import RouterCounts, attach_loss, is_recomputed, set_scale
from dlo_framework.models.experts.expert_mixtures import count_experts, find_mixtures
from dlo_framework.models.experts.mixture_options import MixtureOptions, RouterKind
from dlo_framework.models.experts.routers import (
    BIAS,
    Router,
    Routing,
    expert_scores,
    is_within_capacity,
    load_balancing_loss,
    moved_bias,
    router_z_loss,
)
from dlo_framework.strategy_contract import contract_of

_ROUTERS = re.compile(r"(Router|Gate|Gating)$")


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the routers of a model by name: dlo's, and modules that are called so in transformers' mixtures."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Router) or (_ROUTERS.search(type(module).__name__) and count_experts(module))
    }


def router_kind(router: nn.Module) -> RouterKind:
    """Returns the scores of a router: those of dlo's, or what the code of transformers' forward calls."""
    if isinstance(router, Router):
        return router.kind
    return "sigmoid" if "sigmoid" in inspect.getsource(type(router).forward) else "softmax"


def read_routing(name: str, router: nn.Module, output: Any) -> Routing:
    """Returns what a router has chosen.

    Args:
        name: Name of the router, for the error.
        router: Router.
        output: Output of its forward.

    Raises:
        DloError: If it is not logits, weights and indices, as nearly all routers of transformers (5.24) return.
    """
    if isinstance(output, tuple) and len(output) >= 3:
        logits, weights, indices = output[:3]
        tensors = all(isinstance(part, Tensor) for part in (logits, weights, indices))
        if tensors and weights.shape == indices.shape and indices.ndim == 2 and not indices.is_floating_point():
            return Routing(logits.reshape(-1, logits.shape[-1]), weights, indices)
    raise DloError(
        f"a mixture's router must return logits, weights and indices of the top k experts, got {type(router).__name__}"
        f" of '{name}', which does not; leave out its losses, and callbacks that show its load"
    )


def count_choices(routing: Routing, kind: RouterKind) -> Tensor:
    """Returns the number of tokens of each expert, `[E]` floats, without dropped ones."""
    experts = routing.logits.shape[-1]
    if kind == "expert_choice":
        return routing.logits.new_full((experts,), routing.indices.shape[1])
    order = routing.indices.flatten().sort().values
    edges = torch.searchsorted(order, torch.arange(experts + 1, device=order.device))
    return edges.diff().to(routing.logits.dtype)


class RouterLoad:
    """Sums over the tokens that one router has seen in training, on this rank.

    Attributes:
        counts: Tokens of each expert, `[E]`, in float64 on CPU and CUDA.
        sums: Number of choices, dropped choices, tokens, and sum of the entropies of the scores (in nats), `[4]`.
        step: Choices of all ranks in the current optimizer step, for the load-balancing loss.
    """

    def __init__(self, name: str, router: nn.Module) -> None:
        self.name, self.kind = name, router_kind(router)
        self.counts: Tensor | None = None
        self.sums: Tensor | None = None
        self.step = RouterCounts()

    @torch.no_grad()
    def add(self, routing: Routing) -> None:
        """Adds the choices of a forward."""
        dtype = torch.float32 if routing.logits.device.type == "mps" else torch.float64
        counts = count_choices(routing, self.kind).to(dtype)
        scores = expert_scores(routing.logits.detach(), self.kind)
        shares = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
        entropy = torch.special.entr(shares).sum(dtype=dtype)
        tokens, choices = routing.logits.shape[0], routing.indices.numel()
        sums = torch.stack([entropy.new_tensor(choices), choices - counts.sum(), entropy.new_tensor(tokens), entropy])
        self.counts = counts if self.counts is None else self.counts + counts
        self.sums = sums if self.sums is None else self.sums + sums


def watch_loads(model: nn.Module) -> tuple[list[RouterLoad], list[RemovableHandle]]:
    """Watches the routers of a model in training; returns their loads, and the handles that end it."""

    @torch.compiler.disable
    def add(load: RouterLoad, router: nn.Module, args: Any, output: Any) -> None:
        if router.training and torch.is_grad_enabled() and not is_recomputed():
            load.add(read_routing(load.name, router, output))

    return _watch(model, add)


def watch_losses(
    model: nn.Module, options: MixtureOptions, group: dist.ProcessGroup | None
) -> tuple[list[RouterLoad], list[RemovableHandle]]:
    """Adds the losses of `options` to the gradients of a model's routers, and counts their load.

    The fractions of the load-balancing loss are those of all ranks' tokens, in this micro-batch and in those before it
    in the optimizer step. So a step's gradients do not depend on the number of ranks, and those of the last micro-batch
    balance the whole batch. The caller ends the steps of the loads: :meth:`RouterCounts.end_step`.

    Args:
        model: Model.
        options: Options, of which the factors of the losses count.
        group: Ranks that see other tokens; None for a single process.
    """

    @torch.compiler.disable
    def attach(load: RouterLoad, router: nn.Module, args: Any, output: Any) -> Any:
        if not (router.training and torch.is_grad_enabled()):
            return None
        routing = read_routing(load.name, router, output)
        if options.bias_rate and not is_recomputed():
            load.add(routing)
        losses = []
        if options.aux_loss > 0 and load.kind != "expert_choice":
            if is_recomputed():
                counts = load.step.recall()
            else:
                counts = count_choices(routing, load.kind)
                if group is not None:
                    dist.all_reduce(counts, group=group)
                counts = load.step.add(counts)
            losses.append(options.aux_loss * load_balancing_loss(expert_scores(routing.logits, load.kind), counts))
        if options.z_loss:
            losses.append(options.z_loss * router_z_loss(routing.logits))
        if not losses or not routing.logits.requires_grad:
            return None
        weights = attach_loss(routing.weights, torch.stack(losses).sum())
        new_output = (output[0], weights, *output[2:])
        return Routing(*new_output) if isinstance(output, Routing) else new_output

    return _watch(model, attach)


def _watch(model: nn.Module, hook: Callable[..., Any]) -> tuple[list[RouterLoad], list[RemovableHandle]]:
    """Registers a hook of a load and a router's forward on each router."""
    routers = find_routers(model)
    loads = [RouterLoad(name, router) for name, router in routers.items()]
    pairs = zip(routers.values(), loads, strict=True)
    return loads, [router.register_forward_hook(functools.partial(hook, load)) for router, load in pairs]


@dataclass(frozen=True)
class LayerBalance:
    """Balance of one router over the tokens of all ranks.

    Attributes:
        load: Fraction of the computed choices of each expert, `[E]`; they sum to 1.
        dropped: Fraction of the choices that were dropped.
        entropy: Mean entropy of a token's scores, as a fraction of that of equal scores.
    """

    load: Tensor
    dropped: float
    entropy: float

    @property
    def variation(self) -> float:
        """Coefficient of variation of the load: its standard deviation over its mean; 0 for equal loads."""
        return float(self.load.std(correction=0) / self.load.mean().clamp(min=1e-20))

    @property
    def peak(self) -> float:
        """Load of the busiest expert over the mean load; 1 for equal loads."""
        return float(self.load.max() / self.load.mean().clamp(min=1e-20))


def sum_loads(loads: Sequence[RouterLoad], group: dist.ProcessGroup | None, device: torch.device) -> list[Tensor]:
    """Returns each router's sums over a group of ranks, `[E + 4]` on the CPU, and sets its own to 0; on all its ranks.

    A router that this rank has not called, such as one of another stage of a pipeline, gives a tensor of no elements
    where no rank of the group has called it.

    Args:
        loads: Loads, the same routers on all ranks.
        group: Ranks to sum over; None for this one.
        device: Device of the collective.
    """
    sizes = torch.tensor([0 if load.counts is None else len(load.counts) + 4 for load in loads], device=device)
    if group is not None:
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group)
    sums = []
    for load, size in zip(loads, sizes.tolist(), strict=True):
        if load.counts is None or load.sums is None:
            dtype = torch.float32 if device.type == "mps" else torch.float64
            sums.append(torch.zeros(size, dtype=dtype, device=device))
        else:
            sums.append(torch.cat([load.counts, load.sums]))
        load.counts = load.sums = None
    total = torch.cat(sums) if sums else torch.zeros(0, device=device)
    if group is not None and total.numel():
        dist.all_reduce(total, group=group)
    return list(total.cpu().split(sizes.tolist()))


def describe_balance(sums: Tensor) -> LayerBalance | None:
    """Returns the balance of a router from its sums of :func:`sum_loads`; None if no rank has called it."""
    if not len(sums) or not float(sums[-2]):
        return None
    counts, (choices, dropped, tokens, entropy) = sums[:-4], sums[-4:].tolist()
    equal = float(torch.tensor(float(len(counts))).log())
    return LayerBalance(counts / counts.sum().clamp(min=1), dropped / choices, entropy / tokens / equal)


@torch.no_grad()
def move_biases(routers: Mapping[str, nn.Module], sums: Mapping[str, Tensor], rate: float) -> None:
    """Moves the loss-free biases of routers after an optimizer step.

    Args:
        routers: Routers by name.
        sums: Their sums over all ranks, `[E + 4]`; those without elements are skipped.
        rate: Change of a bias.
    """
    for name, router in routers.items():
        counts = sums[name][:-4]
        if len(counts):
            bias = getattr(router, BIAS)
            bias.copy_(moved_bias(bias, counts.to(bias.device), rate))


def check_routers(model: nn.Module, options: MixtureOptions) -> None:
    """Checks that a model has routers that can have the losses of `options`, before ranks start.

    Raises:
        DloError: If it has no routers, or they have no loss-free bias.
    """
    routers = find_routers(model)
    if not routers:
        raise DloError(
            f"experts without count must have a mixture of experts, got {type(model).__name__}; set count: 8 to replace"
            " its MLPs, or leave experts out"
        )
    lacking = [name for name, router in routers.items() if not isinstance(getattr(router, BIAS, None), Tensor)]
    if options.bias_rate and lacking:
        raise DloError(
            f"experts.bias_rate must be 0 for routers without {BIAS}, got {options.bias_rate} for '{lacking[0]}' of"
            f" {type(model).__name__}; use aux_loss, or a family with a bias (deepseek_v3, glm4_moe)"
        )


#: Attributes of a router: its number of experts, and the number of tokens in a row of its present input.
_EXPERTS, _ROW = "_dlo_experts", "_dlo_row"


# --- capacity of routers that are not dlo's -----------------------------------------------------------------------


def limit_capacity(model: nn.Module, factor: float) -> None:
    """Makes the routers of a model drop choices beyond a capacity in training, in place.

    Args:
        model: Full model, on any device; the meta device will do.
        factor: Bound of an expert's tokens within a row, as a multiple of an equal share.

    Raises:
        DloError: If the model has a mixture that cannot drop choices.
    """
    mixtures = find_mixtures(model)
    other = [mixture.name for mixture in mixtures if mixture.form != "routed" or mixture.router is None]
    other += [name for name in find_routers(model) if name not in {mixture.router for mixture in mixtures}]
    if other or not mixtures:
        raise DloError(
            "experts.capacity_factor must be unset for mixtures other than a router and experts that are called with"
            f" tokens, indices and weights, got {factor} for '{next(iter(other), type(model).__name__)}'; remove it"
        )
    for mixture in mixtures:
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
    if count_experts(experts) != count:
        return None
    return tree_map_only(
        Tensor, lambda value: value if value.is_floating_point() else value.clamp(max=count - 1), (args, kwargs)
    )


def token_group(trainer: Trainer) -> dist.ProcessGroup | None:
    """Returns the group of the ranks that see other tokens; None where all see the same."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    group = contract_of(trainer.strategy).data_group or dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


class RouterTraining(PluginCallback):
    """Adds the losses of the routers to their gradients, and moves their loss-free biases after each optimizer step.

    The biases are buffers, and so in checkpoints. The load that moves them is that of all tokens of an optimizer step:
    of all ranks and of all accumulated micro-batches. The load-balancing loss of a micro-batch has the fractions of all
    ranks' tokens in the micro-batches of the step so far; see :mod:`dlo_framework.models.experts.auxiliary_loss`. A
    LightningModule other than a Task returns its loss through
    :func:`dlo_framework.models.experts.auxiliary_loss.follow_gradient`, for accumulation and loss scaling.

    Args:
        options: Options of the mixtures.
    """

    def __init__(self, options: MixtureOptions) -> None:
        self.options = options
        self._loads: list[RouterLoad] = []
        self._handles: list[RemovableHandle] = []
        self._routers: dict[str, nn.Module] = {}
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to watch the routers."""
        self._remove()
        set_scale(1.0)  # Of an earlier run, perhaps with a scaled loss.
        self._routers = find_routers(pl_module)
        self._loads, self._handles = watch_losses(pl_module, self.options, token_group(trainer))
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begins new counts, and moves the biases, if the batch ended an optimizer step."""
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        for load in self._loads:
            load.step.end_step()
        if not self.options.bias_rate:
            return
        totals = sum_loads(self._loads, token_group(trainer), trainer.strategy.root_device)
        sums = {load.name: part for load, part in zip(self._loads, totals, strict=True)}
        move_biases(self._routers, sums, self.options.bias_rate)

    def _remove(self, *_: Any, **__: Any) -> None:
        """Ends the watch."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._loads, self._routers = [], [], {}

    on_train_end = on_exception = _remove
