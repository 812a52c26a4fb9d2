"""A module cut into units, each of them sharded by torch's FSDP2, and what is asked of it afterwards."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dlo_framework.checkpoint import held_boxes
from dlo_framework.checkpoint.boxes import part_of
from dlo_framework.checkpoint.boxes import whole as whole_box
from dlo_framework.cuts import Layout
from dlo_framework.distributed.canonical import clean
from dlo_framework.distributed.collectives import Communicator, backend_of
from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.held import local
from dlo_framework.distributed.initialise import Initialiser
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.plan import ParallelPlan
from dlo_plugins.fsdp.comms import ComplexReduceScatter, PairwiseAllGather, PairwiseReduceScatter
from dlo_plugins.fsdp.mesh import REPLICATE, SHARD
from dlo_plugins.fsdp.policy import of_unit
from dlo_plugins.fsdp.recompute import recompute
from dlo_plugins.fsdp.step_state import drop_step_state
from dlo_plugins.fsdp.unused_params import reduce_unused_params


@dataclass(frozen=True)
class ShardOptions:
    """How a module is sharded.

    Attributes:
        policy: mixed precision.
        reshard_after_forward: whether a unit's parameters are freed between forward and backward; a number keeps them
            sharded over so many ranks.
        offload: whether shards, and with them the optimizer's step, live in CPU memory.
        recompute: whether units keep their inputs only, and compute the rest again in backward.
        forward_prefetch: units that are gathered ahead in forward.
        backward_prefetch: units that are gathered ahead in backward; None leaves it to FSDP, which gathers one.
        whole_steps: whether the steps as a whole are what gathers the parameters outside units. Otherwise the model's
            outermost modules are, each when it is called.
    """

    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int | None
    offload: bool
    recompute: bool
    forward_prefetch: int
    backward_prefetch: int | None
    whole_steps: bool

    @property
    def needs_fsdp(self) -> bool:
        """Whether an option asks for what FSDP2 does to parameters, also where one rank holds all of them."""
        dtypes = {self.policy.param_dtype, self.policy.output_dtype}
        return self.offload or not dtypes <= {None, torch.float32}


class Steps(nn.Module):
    """Calls a module's methods by name, as a forward pass: the root of the sharding, so that any of them gathers.

    Args:
        module: what has the methods.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what the method returns, or a function that works on the module."""
        call = getattr(self.module, method) if isinstance(method, str) else method
        return call(*args, **kwargs)


class Sharding:
    """A module whose parameters are sharded; they are DTensors, but within a unit's forward and backward.

    Where no two ranks hold the same part of the model, there is nothing to shard, and parameters stay plain tensors;
    unless an option asks for offload or for another dtype: then each rank is a mesh of its own.

    Args:
        module: on any device, or on the meta device.
        units: names of the modules that are gathered as one.
        groups: of the mesh.
        device: where this rank computes.
        options: see there.
        seed: of modules on the meta device.
        layout: what tensor and pipeline parallelism have made of the module, by its names.

    Attributes:
        sharers: the ranks that share what this one holds of the module.
        copy: the ranks that together hold one copy of the whole module.
        parameters: the parameters that this rank holds, or a part of, by name; each once.
        roots: what is called first in a step.
        units: the units' names.
        unwatch: Function that takes the hooks of the last fit's :class:`~dlo_plugins.fsdp.usage.Usage` off the module.
    """

    def __init__(
        self,
        module: nn.Module,
        units: list[str],
        groups: MeshGroups,
        device: torch.device,
        options: ShardOptions,
        seed: int,
        layout: Layout | None = None,
    ) -> None:
        self.module, self.groups, self.device, self.options = module, groups, device, options
        self.layout = layout or Layout()
        self.sharers, self.copy = Communicator(groups.sharers), Communicator(groups.copy)
        self._data, self._tensor = Communicator(groups.data), Communicator(groups.group("tp"))
        wanted = groups.has_data_parallelism or options.needs_fsdp
        self._mesh = groups.data_mesh(REPLICATE, SHARD) if wanted else None
        self._elsewhere = _named(module, self.layout.elsewhere)
        self.units = separable(module, units)
        names = {id(submodule): name for name, submodule in module.named_modules()}
        blocks = [module.get_submodule(name) for name in self.units]
        self.roots: list[Any] = [Steps(module)] if options.whole_steps else callable_roots(module)
        if options.recompute:
            recompute(blocks)
        self._scalars = [parameter for parameter in self._held(module) if parameter.ndim == 0]
        initialise = Initialiser(device, seed, self.layout)
        for part in [*blocks, *(root for root in self.roots if not any(root is block for block in blocks))]:
            named = part.module if isinstance(part, Steps) else part
            initialise(named, names[id(named)])
            self._shard(part)
        self._prefetch(blocks)
        self.collect()
        self._syncs = True
        self.unwatch: Callable[[], None] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are divided among ranks, and gathered for each use."""
        return self._mesh is not None

    def _held(self, part: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in part.parameters() if id(parameter) not in self._elsewhere]

    def collect(self) -> None:
        """Takes note of the module's parameters: what changes their dtype may put others in their place."""
        self.reshard()
        self.parameters: dict[str, nn.Parameter] = {
            clean(name): parameter
            for name, parameter in self.module.named_parameters()
            if clean(name) not in self.layout.elsewhere
        }

    def _shard(self, part: nn.Module) -> None:
        options = self.options
        self._same_everywhere(part)
        if self._mesh is None:
            return
        ignored = {parameter for parameter in part.parameters() if parameter.ndim == 0}
        ignored |= {parameter for parameter in part.parameters() if id(parameter) in self._elsewhere}
        integers = [p for p in part.parameters() if not (p.is_floating_point() or p.is_complex())]
        if integers and not _shards_integers(self._mesh):
            ignored.update(integers)  # Each rank keeps the full tensor.
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if options.offload else OffloadPolicy()
        trained = self._trained(part, ignored)
        fully_shard(
            part,
            mesh=self._mesh,
            reshard_after_forward=options.reshard_after_forward,
            mp_policy=of_unit(options.policy, trained, self.units),
            offload_policy=policy,
            ignored_params=ignored,
        )
        sharded: Any = part
        reduce_unused_params(sharded)
        if self.device.type == "cpu" and backend_of(self.sharers.group, self.device) == "gloo":
            sharded.set_custom_all_gather(PairwiseAllGather(self.sharers))
            sharded.set_custom_reduce_scatter(PairwiseReduceScatter(self.sharers))
        elif any(parameter.is_complex() for parameter in trained.values()):
            sharded.set_custom_reduce_scatter(ComplexReduceScatter())

    def _trained(self, part: nn.Module, ignored: set[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Returns what FSDP2 shards as one with a part, of what trains; what its units hold is sharded already."""
        own = {id(parameter) for parameter in part.parameters() if not isinstance(parameter, DTensor)}
        own -= {id(parameter) for parameter in ignored}
        return {clean(n): p for n, p in self.module.named_parameters() if id(p) in own and p.requires_grad}

    def _same_everywhere(self, part: nn.Module) -> None:
        """Gives all ranks that hold the same part of the model the first one's values of what is not sharded yet."""
        for tensor in [*self._held(part), *part.buffers()]:
            if isinstance(tensor, DTensor) or id(tensor) in self._elsewhere:
                continue
            value = tensor.data.to(self.device).contiguous()
            self._data.broadcast(value)
            tensor.data = value

    def _prefetch(self, blocks: list[Any]) -> None:
        ahead, behind = self.options.forward_prefetch, self.options.backward_prefetch
        if self._mesh is None:
            return
        for number, block in enumerate(blocks):
            if ahead:
                block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])
            if behind is not None:
                block.set_modules_to_backward_prefetch(blocks[max(0, number - behind) : number][::-1])

    # --- steps ---------------------------------------------------------------------------------------------

    def call(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what a method of the module returns, or a function that works on it, with parameters gathered."""
        if self.options.whole_steps:
            return self.roots[0](method, *args, **kwargs)
        call = getattr(self.module, method) if isinstance(method, str) else method
        return call(*args, **kwargs)

    def keep_gathered(self, enabled: bool) -> None:
        """Says whether the backward passes that follow leave parameters gathered: others of the same step come."""
        for root in self._sharded_roots():
            root.set_reshard_after_backward(not enabled)

    def sync(self, enabled: bool) -> None:
        """Says whether the backward passes that follow reduce gradients, or add them up on each rank."""
        if enabled != self._syncs:
            self._syncs = enabled
            for root in self._sharded_roots():
                root.set_requires_gradient_sync(enabled)

    def reshard(self) -> None:
        """Frees what is gathered; the next use gathers the shards' values of then."""
        for root in self.roots:
            for submodule in root.modules():
                if isinstance(submodule, FSDPModule):
                    submodule.reshard()

    def _sharded_roots(self) -> list[Any]:
        return [root for root in self.roots if isinstance(root, FSDPModule)]

    def reset(self) -> None:
        """Drops what a step that raised has left, so that another can be tried."""
        for root in self._sharded_roots():
            drop_step_state(root)
        self.reshard()

    def anywhere(self, flags: list[bool]) -> list[bool]:
        """Returns what holds on any of the ranks that hold the same part of the model."""
        found = self._data.maximum(torch.tensor(flags, dtype=torch.uint8, device=self.device))
        return [bool(flag) for flag in found.tolist()]

    @torch.no_grad()
    def complete_gradients(self) -> None:
        """Adds up the gradients that are parts of a sum over the ranks of tensor parallelism."""
        self.complete({name: p.grad for name, p in self.parameters.items() if p.grad is not None})

    @torch.no_grad()
    def complete(self, gradients: Mapping[str, Tensor]) -> None:
        """Likewise those of these gradients, which are given by their parameters' names, in place."""
        names = [name for name in self.parameters if name in self.layout.partial and name in gradients]
        parts = [local(gradients[name]) for name in names]
        if not parts:
            return
        joined = self._tensor.sum(torch.cat([part.reshape(-1) for part in parts]))
        for part, total in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))

    def share_buffers(self) -> None:
        """Gives the ranks that hold the same part of the module the first one's buffers: norms' statistics, say."""
        for buffer in self.module.buffers():
            if not isinstance(buffer, DTensor) and not buffer.is_meta:
                self._data.broadcast(buffer)

    @torch.no_grad()
    def average_scalars(self) -> None:
        """Averages the gradients of parameters without dims, which each rank holds whole; those without one get 0."""
        scalars = [parameter for parameter in self._scalars if parameter.requires_grad]
        if not scalars:
            return
        for parameter in scalars:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        wide = functools.reduce(torch.promote_types, (parameter.dtype for parameter in scalars), torch.float32)
        joined = self._data.sum(torch.stack([p.grad.to(wide) for p in scalars if p.grad is not None]))
        for parameter, mean in zip(scalars, joined / self._data.size, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(mean if parameter.is_complex() or not mean.is_complex() else mean.real)


def _shards_integers(mesh: DeviceMesh) -> bool:
    """Returns whether FSDP2 takes parameters of integers; torch 2.11 asks for their gradients, and raises."""
    probe = nn.Module()
    probe.integers = nn.Parameter(torch.zeros(mesh.size(), dtype=torch.uint8, device=mesh.device_type), False)
    try:
        fully_shard(probe, mesh=mesh)
    except RuntimeError:
        return False
    return True


def local_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """Returns what this rank holds of a parameter, of a whole tensor of its shape."""
    if not isinstance(parameter, DTensor):
        return whole
    boxes = [box for box, _ in held_boxes(parameter.detach())]
    return part_of(whole, whole_box(whole.shape), boxes[0]) if boxes else torch.empty_like(local(parameter))


def separable(module: nn.Module, units: Iterable[str]) -> list[str]:
    """Returns the units that share no parameter with anything outside them, the innermost first.

    A parameter that is tied across units, or to what lies outside them, is the root's, and so is all of its unit:
    FSDP2 would shard it once for each, and untie it.
    """
    homes: dict[int, set[str]] = {}
    inside = {
        name: {path for path, _ in module.get_submodule(name).named_parameters(name, remove_duplicate=False)}
        for name in units
    }
    for path, parameter in module.named_parameters(remove_duplicate=False):
        homes.setdefault(id(parameter), set()).add(path)
    chosen = [
        name
        for name in units
        if all(homes[id(parameter)] <= inside[name] for parameter in module.get_submodule(name).parameters())
        and inside[name]
    ]
    order = {name: number for number, (name, _) in enumerate(module.named_modules())}
    nested = any(name.startswith(f"{other}.") for name in chosen for other in chosen)
    return sorted(chosen, key=lambda name: (-name.count(".") if nested else 0, order[name]))


def named_units(module: nn.Module, patterns: list[str]) -> list[str]:
    """Returns the modules that a config's ``units`` name.

    Raises:
        DloError: for a pattern that matches nothing, or a container, which is never called.
    """
    names = [name for name, _ in module.named_modules() if name]
    found: list[str] = []
    for pattern in patterns:
        matches = ParallelPlan(blocks=(pattern,)).block_names(module)
        if not matches:
            raise DloError(f"units: '{pattern}' matches no module{did_you_mean(pattern, names)}")
        container = next(
            (n for n in matches if isinstance(module.get_submodule(n), nn.ModuleList | nn.ModuleDict)), None
        )
        if container is not None:
            raise DloError(
                f"units: '{container}' is a {type(module.get_submodule(container)).__name__}, which is never called and"
                f" so never gathered; name what is in it: '{container}.*'"
            )
        found += matches
    return list(dict.fromkeys(found))


def callable_roots(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules with parameters that can be called.

    Raises:
        DloError: if the module itself holds parameters: nothing would gather them.
    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise DloError(
            f"FSDP with manual optimization gathers a module's parameters when it is called, but"
            f" {type(module).__name__} itself holds {', '.join(own[:5])}; put them into a module of their own"
        )
    roots: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            roots += callable_roots(child)
        elif next(child.parameters(), None) is not None:
            roots.append(child)
    return roots


def _named(module: nn.Module, names: set[str]) -> set[int]:
    """Returns the ids of a module's parameters and buffers of some names."""
    return {id(tensor) for name, tensor in itertools.chain(*_tensors(module)) if clean(name) in names}


def _tensors(module: nn.Module) -> tuple[Iterator[tuple[str, Tensor]], Iterator[tuple[str, Tensor]]]:
    return module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
