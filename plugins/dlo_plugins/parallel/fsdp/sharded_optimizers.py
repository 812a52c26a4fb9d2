"""Optimizer shards of a sharded module: creates them, records which parameters are used, and sets their gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.gradient_check import check_backward_seen
from dlo_framework.distributed.optimizer_steps import prefer_fused
from dlo_framework.errors import DloError, shown_names
from dlo_framework.local_memory import local_tensor
from dlo_framework.norms import total_norm
from dlo_framework.optimizers import stepped_tensors
from dlo_framework.shards import Shard, TensorSlice, attach_slice, place_in_slice
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.parallel.fsdp.row_shards import JoinedTensorShard, RowGroup, RowShard, SeparateShards, make_groups
from dlo_plugins.parallel.fsdp.sharding import ShardedModule
from dlo_plugins.parallel.optimizer_probe import Kind, probe_optimizer
from dlo_plugins.parallel.optimizer_shards import (
    FullTensorShard,
    OptimizerShard,
    clips_by_global_norm,
    patch_global_norm,
)
from dlo_plugins.parallel.stochastic_rounding import StochasticSteps
from dlo_plugins.parallel.user_code import CHANGED, GradientWrites


class UsedParams:
    """Record of the parameters that got a gradient on this rank since ``used`` was cleared.

    FSDP2 gathers into parameters of its own, each of which gets a hook when it is first gathered. Parameters that are
    not sharded get theirs from the start, because a user's step may call submodules without ever calling the root.

    Args:
        sharded: Sharded module.

    Attributes:
        used: Names of parameters with a gradient.
        announced: Whether this backward was started through the strategy.
        gathered: Parameters that FSDP2 gathers into, by name.
    """

    def __init__(self, sharded: ShardedModule) -> None:
        self._sharding = sharded
        if sharded.unwatch is not None:
            sharded.unwatch()
        sharded.unwatch = self.remove
        self.used: set[str] = set()
        self.announced = False
        self.gathered: dict[str, Tensor] = {}
        self.handles: list[Any] = []
        names = {id(parameter): name for name, parameter in sharded.parameters.items()}
        for copies in sharded.copies:
            copies.on_gather = lambda shard, copy: self._add(names[id(shard)], copy)
        claimed: set[int] = set()
        parts = [sharded.module.get_submodule(name) for name in sharded.units]
        parts += [root for root in sharded.roots if not any(root is part for part in parts)]
        for part in parts:  # From the inside out.
            places = []
            for submodule in part.modules():
                if id(submodule) in claimed:
                    continue
                claimed.add(id(submodule))
                own = [(key, p) for key, p in submodule._parameters.items() if p is not None and id(p) in names]
                places += [(submodule, key, names[id(p)]) for key, p in own if not isinstance(p, DTensor)]
            if places:
                look = self._watch(places)
                self.handles.append(part.register_forward_pre_hook(look))
                look()

    def record_accumulated(self) -> None:
        """Records parameters whose gradients a zero-bubble schedule has computed, for which no hook runs."""
        self.used |= {name for name, full in self.gathered.items() if full.grad is not None}

    def absent(self) -> list[str]:
        """Returns the names of the trainable parameters without a gradient."""
        trained = (name for name, parameter in self._sharding.parameters.items() if parameter.requires_grad)
        return [name for name in trained if name not in self.used]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()
        for copies in self._sharding.copies:
            copies.on_gather = None

    def _watch(self, places: list[tuple[nn.Module, str, str]]) -> Callable[..., None]:
        def look(*_: Any) -> None:
            if not torch.is_grad_enabled():
                return
            for submodule, key, name in places:
                parameter = submodule._parameters[key]
                # Another is a copy of a pipeline's weights, whose gradients are those of another step.
                if parameter is not None and parameter is self._sharding.parameters.get(name):
                    self._add(name, parameter)

        return look

    def _add(self, name: str, parameter: Tensor) -> None:
        if parameter.requires_grad and self.gathered.get(name) is not parameter:
            self.gathered[name] = parameter
            self.handles.append(parameter.register_post_accumulate_grad_hook(self._note(name)))

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            check_backward_seen(self.announced)
            self.used.add(name)

        return note


class OptimizerShards:
    """Optimizer shards of all optimizers, which replace the parameters in the optimizers' parameter groups.

    An optimizer whose update depends on all tensors keeps the DTensors, and torch communicates in each of its
    operations. Parameters that are added to an optimizer later stay DTensors too.

    Args:
        optimizers: Optimizers of the sharded module.
        sharded: Sharding of the module.
        rounding: Steps of bf16 parameters without master weights; None where there are none.
    """

    def __init__(
        self, optimizers: list[Optimizer], sharded: ShardedModule, rounding: StochasticSteps | None = None
    ) -> None:
        self._rounding = rounding
        self.sharded, self.communicator = sharded, sharded.sharers
        self.optimizers = optimizers
        self._names = {id(parameter): plain_name(name) for name, parameter in sharded.module.named_parameters()}
        self._shares = {id(optimizer): self._share(optimizer) for optimizer in optimizers}
        #: Full tensors that are stepped after backward, where the others are stepped in backward.
        self._late: list[OptimizerShard[RowGroup]] | None = None
        #: Parameters by optimizer, with the gradients from which those of the optimizer were set.
        self._given: dict[int, list[tuple[str, nn.Parameter, Tensor | None]]] = {}
        self._copied: dict[int, str] = {}  # Names by the ids of gradients of which there are full copies.
        self._memory = {id(p): local_tensor(p).data_ptr() for p in self._stepped_parameters()}

    def _stepped_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of which optimizers step other tensors: rows of the same memory, or copies."""
        for share in self._shares.values():
            yield from _parameters(share) if share is not None else ()

    def _check_memory(self) -> None:
        """Checks that the user's code has left parameters their memory.

        Raises:
            DloError: It has assigned to the ``data`` of one, whose optimizer would go on with the memory from before.
        """
        assigned = (p for p in self._stepped_parameters() if local_tensor(p).data_ptr() != self._memory.get(id(p)))
        names = [self._names[id(parameter)] for parameter in assigned]
        if names:
            raise DloError(
                f"parameters under a mesh or FSDP must be written in place, got {shown_names(names)} whose data were"
                " assigned; use `with torch.no_grad(): parameter.copy_(...)`, or strategy ddp"
            )

    def _share(self, optimizer: Optimizer) -> OptimizerShard[RowGroup] | None:
        # In manual optimization a forward may have gathered parameters since the last backward.
        optimizer.register_step_pre_hook(lambda *_: self.sharded.reshard())
        kind = self._probe(optimizer)
        if self.sharded.layout.experts and kind == "all" and not clips_by_global_norm(optimizer):
            raise DloError(
                "an optimizer under ep must update each tensor without the others, got"
                f" {type(optimizer).__name__}; use adamw, for example, or set ep to 1"
            )
        if kind == "all" and not patch_global_norm(optimizer, lambda: self.gradient_norm(optimizer)):
            options = self.sharded.options
            if options.has_masters or (options.offload and self.sharded.device.type != "cpu"):
                given = "offload" if options.offload else "param_dtype"
                raise DloError(
                    f"an optimizer under {given} must update each tensor without the others, got"
                    f" {type(optimizer).__name__}; leave {given} out"
                )
            if self._rounding is not None:
                raise DloError(
                    "an optimizer with bf16_weights: stochastic must update each tensor without the others, got"
                    f" {type(optimizer).__name__}; set bf16_weights: masters"
                )
            return None
        layout = self.sharded.layout
        groups = self._groups(optimizer, lambda name: name not in layout.experts, self.communicator)
        share: OptimizerShard[RowGroup]
        if kind == "elementwise":
            if layout.experts:
                groups += self._groups(optimizer, lambda name: name in layout.experts, self.sharded.expert_sharers)
            share = RowShard(groups, self.communicator)
        else:
            share = self._full_tensors_of(groups)
            if layout.experts:
                share = SeparateShards([share, *self._full_experts_of(optimizer)])
        share.replace_params(optimizer, self._names)
        prefer_fused(optimizer, on_cpu=self.sharded.options.offload and self.sharded.device.type != "cpu")
        if self._rounding is not None:
            self._rounding.attach(optimizer, share.local_params, functools.partial(_place, share, layout.slices))
        optimizer.register_step_post_hook(lambda *_: self._after_step(share))
        return share

    def _after_step(self, share: OptimizerShard[RowGroup]) -> None:
        for part in self._stepped_late(share):
            part.all_gather_params()

    def _stepped_late(self, share: OptimizerShard[RowGroup]) -> list[OptimizerShard[RowGroup]]:
        """Returns the parts of an optimizer's shard that are stepped after backward."""
        return [share] if self._late is None else self._late

    def _groups(self, optimizer: Optimizer, selects: Callable[[str], bool], sharers: Communicator) -> list[RowGroup]:
        """Returns the groups of an optimizer's parameters that a function of the name selects."""
        names = {id(parameter): name for name, parameter in self.sharded.parameters.items() if selects(name)}
        masters = self.sharded.masters
        if masters is not None:
            given: list[Any] = stepped_tensors(optimizer)
            named = {names[id(parameter)]: parameter for parameter in given if id(parameter) in names}
            return list(masters.groups(named, self.sharded.device))
        return make_groups(optimizer, names, sharers, self.sharded.device)

    def _full_tensors_of(self, groups: list[RowGroup]) -> FullTensorShard[RowGroup]:
        """Returns the shard of the full tensors of parameters that `ep` does not divide."""
        if self.sharded.tensor_parallel.size == 1:
            return FullTensorShard(groups, self.communicator)
        experts, slices = self.sharded.layout.experts, self.sharded.layout.slices
        of_tp = {name: cut for name, cut in slices.items() if name not in experts}
        return JoinedTensorShard(groups, self.communicator, self.sharded.tensor_parallel, of_tp)

    def _full_experts_of(self, optimizer: Optimizer) -> list[FullTensorShard[RowGroup]]:
        """Returns the shards of the full tensors of experts: those that `ep` slices, and those that `tp` slices too.

        Each rank of `tp` steps its copy of the first, which then are biases.
        """
        layout, groups = self.sharded.layout, self.sharded.groups
        shards: list[FullTensorShard[RowGroup]] = []
        for both in (False, True):
            own = {
                name: layout.slices[name] for name in layout.experts if (layout.slices[name].inner is not None) == both
            }
            of_these = self._groups(optimizer, own.__contains__, self.sharded.expert_sharers)
            if of_these:
                joined = Communicator(groups.expert_slice_group if both else groups.expert_group)
                own = {name: own[name] for group in of_these for name in group.names}
                shards.append(JoinedTensorShard(of_these, self.sharded.expert_sharers, joined, own))
        return shards

    def _probe(self, optimizer: Optimizer) -> Kind:
        """Returns what an update depends on; tp ranks, whose slices may differ in shape, agree."""
        kind, ranks = probe_optimizer(optimizer), self.sharded.tensor_parallel
        if ranks.size == 1 or kind == "all":
            return kind
        combining = ranks.sum(torch.tensor(float(kind == "tensor"), device=self.sharded.device))
        return "tensor" if combining else "elementwise"

    # --- gradients -----------------------------------------------------------------------------------------

    def drop_gradients(self, wanted: Callable[[OptimizerShard[RowGroup]], bool]) -> set[str]:
        """Drops the gradients of the shards that ``wanted`` selects; returns the parameters' names.

        A pipeline's step runs before Lightning's `zero_grad`: without this, the gradients that the last step has set
        would take memory beside the new ones.
        """
        dropped: set[str] = set()
        for share in self._shares.values():
            if share is not None and wanted(share):
                for tensor in (*_parameters(share), *share.stepped_tensors):
                    tensor.grad = None
                dropped.update(name for group in share.groups for name in group.names)
        return dropped

    @staticmethod
    def grads_dropped(share: OptimizerShard[RowGroup]) -> bool:
        """Returns whether ``zero_grad`` or a step has dropped the gradients that were set."""
        return all(tensor.grad is None for tensor in share.stepped_tensors)

    @torch.no_grad()
    def set_grads(self, used: Iterable[str]) -> None:
        """Sets the gradients of the optimizers' tensors from those that backward has left on the parameters."""
        used = set(used)
        self._check_memory()
        for key, share in self._shares.items():
            if share is None:
                continue
            given = self._given[key] = [(self._names[id(p)], p, p.grad) for p in _parameters(share)]
            if not isinstance(share, RowShard):
                self._copied |= {id(gradient): name for name, _, gradient in given if gradient is not None}
            if not any(tensor.requires_grad for tensor in share.stepped_tensors):
                for parameter in _parameters(share):  # The user has toggled another optimizer.
                    parameter.grad = None
                continue
            for part in self._stepped_late(share):
                part.set_grads(used)
            for tensor in share.stepped_tensors if self._late is None else ():
                if tensor.numel() == 0 and tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)  # The loss scaler must find at least one gradient.

    def forget_gradients(self) -> None:
        """Forgets the gradients that were set, as a backward has computed others."""
        self._given.clear()
        self._copied.clear()

    @contextlib.contextmanager
    def guard_gradients(self, optimizer: Optimizer | None) -> Iterator[None]:
        """Checks that the user's code inside the block changes gradients so that the optimizer, if any, sees it.

        Raises:
            DloError: It replaces one, or changes one of which the optimizer has a full copy.
        """
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with self.guard_writes():
            yield
        for name, parameter, given in self._given.pop(id(optimizer), ()) if self._late is None else ():
            if parameter.grad is not given:
                raise DloError(CHANGED.format("replaced", name))

    def guard_writes(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that raises where code writes to a gradient of which an optimizer has a full copy."""
        has_copies = any(isinstance(share, FullTensorShard | SeparateShards) for share in self._shares.values())
        return GradientWrites(self._copied) if has_copies else contextlib.nullcontext()

    def watch_gradients(self, ready: Callable[[list[Tensor]], None] | None) -> list[RemovableHandle]:
        """Calls a function in backward with this rank's tensors of the parameters whose gradients are complete.

        FSDP2 (torch 2.11 to 2.15) calls the hooks of ``register_post_accumulate_grad_hook`` on its sharded parameters
        once it has reduced a gradient, over `cp` and the ranks of experts too; where nothing is sharded, autograd calls
        them. Scalars, which FSDP2 does not shard, keep their gradients for the ordinary step.

        Rows are stepped parameter by parameter. Full tensors are stepped unit by unit, so that the ranks step those of
        a unit at the same time: they exchange the unit's gradients and values, and then its new values.

        Returns:
            Handles of the hooks.
        """
        self._late = None
        if ready is None:
            return []
        (share,) = self._shares.values()
        assert share is not None, "the callback refuses an optimizer that needs all tensors"
        ready = ready if self._rounding is None else self._rounding.around(ready)
        if not isinstance(share, RowShard):
            return self._watch_units(share, ready)
        handles = []
        for group in share.groups:
            for number, (name, parameter) in enumerate(zip(group.names, group.parameters, strict=True)):
                if parameter.ndim > 0 and parameter.requires_grad:
                    local = share.local_params[name] if number in group.owned else None
                    handles.append(parameter.register_post_accumulate_grad_hook(self._step_rows(name, local, ready)))
        return handles

    def _watch_units(
        self, share: OptimizerShard[RowGroup], ready: Callable[[list[Tensor]], None]
    ) -> list[RemovableHandle]:
        """Steps the full tensors of each unit in backward; returns the handles of the hooks."""
        parts = share.parts if isinstance(share, SeparateShards) else [share]
        handles: list[RemovableHandle] = []
        late: list[OptimizerShard[RowGroup]] = []
        for part in parts:
            assert isinstance(part, FullTensorShard)
            by_unit: dict[tuple[str, torch.dtype], dict[str, nn.Parameter]] = {}
            scalars: dict[torch.dtype, dict[str, nn.Parameter]] = {}
            for group in part.groups:
                for name, parameter in zip(group.names, group.parameters, strict=True):
                    if parameter.ndim == 0:
                        scalars.setdefault(parameter.dtype, {})[name] = parameter
                    elif parameter.requires_grad:
                        by_unit.setdefault((self._unit_of(name), parameter.dtype), {})[name] = parameter
            ranks = part.communicator
            late.append(part.in_groups([RowGroup(named, ranks, self.sharded.device) for named in scalars.values()]))
            for named in by_unit.values():
                group = RowGroup(named, ranks, self.sharded.device)
                step = self._step_unit(part.in_groups([group]), group, ready)
                handles += [parameter.register_post_accumulate_grad_hook(step) for parameter in named.values()]
        self._late = [part for part in late if part.groups]
        return handles

    def _unit_of(self, name: str) -> str:
        """Returns the smallest unit with a parameter; outside units its module."""
        units = (unit for unit in self.sharded.units if name.startswith(f"{unit}."))
        return max(units, key=len, default=name.rpartition(".")[0])

    def _step_unit(
        self, share: FullTensorShard[RowGroup], group: RowGroup, ready: Callable[[list[Tensor]], None]
    ) -> Callable[[Tensor], None]:
        """Returns a hook that steps a unit's full tensors at the last of its gradients."""

        @torch.no_grad()
        def arrived(_: Tensor) -> None:
            gradients = {name: p.grad for name, p in zip(group.names, group.parameters, strict=True)}
            present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            if len(present) < len(gradients):
                return
            if group.step_device != self.sharded.device:
                torch.get_device_module(self.sharded.device).current_stream().synchronize()
            self.sharded.reduce_partial(present)
            share.step_group(group, ready)
            group.all_gather_params()
            for parameter in group.parameters:
                parameter.grad = None

        return arrived

    def _step_rows(
        self, name: str, local: Tensor | None, ready: Callable[[list[Tensor]], None]
    ) -> Callable[[Tensor], None]:
        """Returns a hook that passes on a parameter's complete gradient, as that of this rank's rows."""

        @torch.no_grad()
        def step(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if local is None or gradient is None:
                return
            rows = local_tensor(gradient)
            if rows.device != self.sharded.device:
                # torch 2.11 does not wait for FSDP2's copy to the CPU before hooks, 2.14 does.
                torch.get_device_module(self.sharded.device).current_stream().synchronize()
            self.sharded.reduce_partial({name: gradient})
            local.grad = rows.reshape(-1).view_as(local)
            ready([local])

        return step

    def gradient_norm(self, optimizer: Any) -> Tensor:
        """Returns the 2-norm over all ranks of an optimizer's gradients, each element counted once."""
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        stepped = self.tensors(optimizer)
        gradients = {name: tensor.grad for name, tensor in stepped.items() if tensor.grad is not None}
        return self._norm(gradients, stepped)

    def norm_of_shards(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the 2-norm over a copy's ranks of tensors laid out as its parameters, each element counted once."""
        return self._norm(values, self.sharded.parameters)

    def _norm(self, values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
        counted = (local_tensor(value) for name, value in values.items() if self._counts(name, tensors[name]))
        return total_norm(counted, self.sharded.device, self.sharded.copy)

    def _counts(self, name: str, tensor: Tensor) -> bool:
        """Returns whether the norm counts this rank's shard of a gradient, of which another rank may have a copy."""
        layout, place = self.sharded.layout, self.sharded.groups.coordinates
        # A sliced tensor that is stepped in full is stepped by one tp rank.
        cut = layout.slices.get(name)
        is_cut = cut is not None and (name not in layout.experts or cut.inner is not None)  # over tp
        if name in layout.tied_copies or (place.tp and not is_cut):
            return False
        if self.sharded.is_replicated and self.share_of(name) is None and self.communicator.rank:
            return False  # The optimizer steps full tensors on each rank.
        # A scalar without a local parameter is replicated on every rank.
        return not (id(tensor) in self._names and tensor.ndim == 0 and self.communicator.rank)

    # --- state ---------------------------------------------------------------------------------------------

    def tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the tensors that an optimizer steps on this rank, by parameter name."""
        share = self._shares[id(optimizer)]
        tensors = dict(share.local_params) if share is not None else {}
        for tensor in stepped_tensors(optimizer):
            if id(tensor) in self._names:
                tensors[self._names[id(tensor)]] = tensor
        return tensors

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the parameter names of each parameter group, those of other ranks' shards too."""
        share = self._shares[id(optimizer)]
        known = share.group_names if share is not None else []
        added = optimizer.param_groups[len(known) :]
        return known + [[self._names[id(parameter)] for parameter in group["params"]] for group in added]

    def share_of(self, name: str) -> OptimizerShard[RowGroup] | None:
        """Returns the optimizer shard with a parameter; None for one that an optimizer steps as a DTensor."""
        return next((share for share in self._shares.values() if share is not None and name in share.shapes), None)

    def as_shard(self, name: str, value: Tensor) -> Shard:
        """Returns a state tensor as a shard of the tensor in the parameter's shape."""
        share = self.share_of(name)
        if share is None:
            return attach_slice(value, self.sharded.layout.slices.get(name))
        return _place(share, self.sharded.layout.slices, name, value)

    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Shard | None:
        """Returns an uninitialised shard of a state tensor; None for a parameter that is stepped as a DTensor."""
        share, cut = self.share_of(name), self.sharded.layout.slices.get(name)
        if share is None:
            return None
        if cut is None or len(shape) <= cut.dim or shape[cut.dim] != cut.size:
            return share.empty_shard(name, shape, dtype)
        shard = share.empty_shard(name, cut.slice_shape(shape), dtype)
        return share.empty_shard(name, shape, dtype) if isinstance(shard, Tensor) else place_in_slice(shard, cut)


def _place(share: OptimizerShard[RowGroup], slices: dict[str, TensorSlice], name: str, value: Tensor) -> Shard:
    """Returns a tensor in the shape of a stepped one as a shard of the parameter."""
    shard = share.as_shard(name, value)
    # State in the parameter's shape is a shard under an elementwise optimizer; a step count is not.
    cut = slices.get(name)
    return shard if cut is None or isinstance(shard, Tensor) else place_in_slice(shard, cut)


def _parameters(share: OptimizerShard[RowGroup]) -> list[nn.Parameter]:
    return [parameter for group in share.groups for parameter in group.parameters]
