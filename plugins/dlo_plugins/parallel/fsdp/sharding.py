"""Shards a module with torch's FSDP2, unit by unit, and calls, reduces and reshards it."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from dlo_framework.distributed.collectives import Communicator, backend_of
from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.meta_init import Initialiser
from dlo_framework.distributed.model_units import CONTAINERS
from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.local_memory import local_tensor
from dlo_framework.models.recompute import recompute
from dlo_framework.plan import ParallelPlan
from dlo_framework.shards import Layout, attach_slice, held_boxes, slice_view
from dlo_framework.shards import full_box as whole_box
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.parallel.fsdp.gathered_copies import (
    GatheredCopies,
    ShardUse,
    WrittenValues,
    bound_rows_alike,
)
from dlo_plugins.parallel.fsdp.precision_policy import cast_tensors, unit_policy
from dlo_plugins.parallel.fsdp.row_shards import MasterRows, like_gradient, shard_dim
from dlo_plugins.parallel.fsdp.torch_fsdp import (
    ComplexReduceScatter,
    PairwiseAllGather,
    PairwiseReduceScatter,
    accumulate_gradients,
    begin_root,
    complete_gradients,
    drop_step_state,
    own_groups,
    reduce_accumulated,
    resume_forward,
    state_of,
)
from dlo_plugins.parallel.user_code import check_held, move_hooks

#: Elements of the gradients that are averaged in one message.
_BUCKET = 2**23


@dataclass(frozen=True)
class ShardOptions:
    """Options of sharding a module.

    Attributes:
        policy: Mixed-precision policy.
        reshard_after_forward: Whether a unit's parameters are freed between forward and backward; a number reshards
            them over that number of ranks.
        offload: Whether shards are in CPU memory, where the optimizer then steps.
        recompute: Whether units keep only their inputs for backward, and recompute their activations.
        forward_prefetch: Number of units that are gathered ahead in forward.
        backward_prefetch: Number of units that are gathered ahead in backward; None for FSDP's default, one.
        whole_steps: Whether the parameters outside units are gathered for a full step. Otherwise the model's outermost
            modules gather them, each when it is called.
        full_parameters: Whether data-parallel ranks each have full parameters, and shard the optimizer state alone.
            Offload, and another dtype, then need master weights, which the ranks shard too.
    """

    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int | None
    offload: bool
    recompute: bool
    forward_prefetch: int
    backward_prefetch: int | None
    whole_steps: bool
    full_parameters: bool = False

    @property
    def needs_fsdp(self) -> bool:
        """Whether an option requires FSDP2 even where one rank holds all parameters."""
        dtypes = {self.policy.param_dtype, self.policy.output_dtype}
        return not self.full_parameters and (self.offload or not dtypes <= {None, torch.float32})

    @property
    def has_masters(self) -> bool:
        """Whether full parameters have master weights, of which each rank has its rows."""
        return self.full_parameters and (self.offload or self.policy.param_dtype not in (None, torch.float32))


class StepRoot(nn.Module):
    """Root of the sharding, whose forward calls any function of the module, so that every one gathers.

    Args:
        module: Module that the functions use.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the function, and returns its result."""
        return function(*args, **kwargs)


class ShardedModule:
    """Module whose parameters are sharded: DTensors, except during a unit's forward and backward.

    Where each rank holds another slice of the model, there is nothing to shard, and parameters stay plain tensors.
    Offload or another dtype still needs FSDP2; then each rank is a mesh of its own.

    Args:
        module: Module on any device, also on the meta device.
        units: Names of the modules that are gathered together.
        groups: Process groups of the mesh.
        device: Device on which this rank computes.
        options: Options of the sharding.
        seed: Seed for modules on the meta device.
        layout: Slices and stages that tensor and pipeline parallelism have made of the module, by parameter name.

    Attributes:
        sharers: Communicator of the ranks among which this rank's part of the module is sharded.
        expert_sharers: Communicator of those among which its experts are sharded, where `ep` divides them.
        copy: Communicator of the ranks that together hold one copy of the full module.
        tensor_parallel: Communicator of the tp axis.
        masters: Master weights of full parameters; None where there are none.
        parameters: Parameters of which this rank holds the full tensor or a shard, by name; each once.
        roots: Outermost sharded modules.
        units: Names of the units.
        copies: Gathered copies of the sharded parameters, the innermost first.
        kept: Those of them that are gathered for each full step, because a step uses them outside their unit's forward.
        written: Record of what this rank has written to gathered copies, which :meth:`check_writes` compares.
        unwatch: Function that removes the hooks of the last fit's :class:`~.sharded_optimizers.UsedParams`.
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
        self.sharers, self.copy = Communicator(groups.shard_group), groups.replica_group
        self._data, self.tensor_parallel = Communicator(groups.data_group), Communicator(groups.group("tp"))
        self._averaging = Communicator(groups.averaging_group)
        axes = ("dp_replicate", "dp_shard")
        wanted = (groups.has_data_parallelism and not options.full_parameters) or options.needs_fsdp
        self._mesh = groups.data_mesh(*axes) if wanted else None
        self._expert_mesh = groups.expert_mesh(*axes) if wanted and self.layout.experts else None
        if self.layout.experts:
            self._expert_data = Communicator(groups.expert_data_group)
            self._expert_averaging = Communicator(groups.expert_averaging_group)
            self.expert_sharers = Communicator(groups.expert_shard_group)
        every = itertools.chain(
            module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        )
        self._elsewhere = {id(tensor) for name, tensor in every if plain_name(name) in self.layout.other_stages}
        self.units = separable_units(module, units)
        names = {id(submodule): name for name, submodule in module.named_modules()}
        blocks = [module.get_submodule(name) for name in self.units]
        self.roots: list[Any] = [StepRoot(module)] if options.whole_steps else find_roots(module)
        experts = self.layout.expert_modules  # Parts of blocks.
        outer = [block for name, block in zip(self.units, blocks, strict=True) if name not in experts]
        if options.recompute:
            recompute(outer)
        self._scalars = [parameter for parameter in self._params_here(module) if parameter.ndim == 0]
        step_device = torch.device("cpu") if options.offload else device
        self.masters = MasterRows(step_device, options.policy.param_dtype) if options.has_masters else None
        self.copies: list[GatheredCopies] = []
        self.kept: list[GatheredCopies] = []
        self.written = WrittenValues()
        self._compares_all = False
        self._compared: set[str] = set()
        self._replaced: dict[str, weakref.ref[nn.Parameter]] = {}
        initialise = Initialiser(device, seed, self.layout)
        for part in [*blocks, *(root for root in self.roots if not any(root is block for block in blocks))]:
            named = part.module if isinstance(part, StepRoot) else part
            initialise(named, names[id(named)])
            self._shard(part)
        self._prefetch(outer)
        check_held(module, self._replaced)
        if self.is_sharded and self._averaging.size > 1:
            bound_rows_alike(module, self._averaging)
        self.collect_params()
        self._syncs, self._keeps_gathered = True, False
        self.unwatch: Callable[[], None] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the parameters and gathers them for each use."""
        return self._mesh is not None

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks have the same full parameters, whose gradients :meth:`average_gradients` averages."""
        return not self.is_sharded and self._averaging.size > 1

    def _params_here(self, part: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in part.parameters() if id(parameter) not in self._elsewhere]

    def collect_params(self) -> None:
        """Collects the module's parameters by name, after their dtype may have changed and replaced them."""
        self.reshard()
        self.parameters: dict[str, nn.Parameter] = {
            plain_name(name): parameter
            for name, parameter in self.module.named_parameters()
            if plain_name(name) not in self.layout.other_stages
        }
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}

    def _shard(self, part: nn.Module) -> None:
        options = self.options
        self._broadcast_params(part)
        if self._mesh is None:
            if self.masters is not None:
                own = {id(parameter) for parameter in self._params_here(part)}
                named = {plain_name(name): p for name, p in self.module.named_parameters() if id(p) in own}
                self.masters.add(named, self.expert_sharers if self._has_experts(part) else self.sharers)
            if options.full_parameters:
                cast_tensors(part, options.policy)
            return
        ignored = {parameter for parameter in part.parameters() if parameter.ndim == 0 or parameter.numel() == 0}
        ignored |= {parameter for parameter in part.parameters() if id(parameter) in self._elsewhere}
        integers = [p for p in part.parameters() if not (p.is_floating_point() or p.is_complex())]
        if integers and not _shards_integers(self._mesh):
            ignored.update(integers)  # Each rank keeps the full tensor.
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if options.offload else OffloadPolicy()
        # The parameters of this group; those of its units are sharded already.
        own = {id(p) for p in part.parameters() if not isinstance(p, DTensor) and p not in ignored}
        trained = {
            plain_name(name): p for name, p in self.module.named_parameters() if id(p) in own and p.requires_grad
        }
        precision, reshard = unit_policy(options.policy, trained, self.units), options.reshard_after_forward
        mesh, sharers, of_experts = self._mesh, self.sharers, self._has_experts(part)
        if of_experts:
            assert self._expert_mesh is not None
            mesh, sharers = self._expert_mesh, self.expert_sharers
            # The block has cast its inputs, and the router's weights keep their dtype.
            precision = replace(precision, cast_forward_inputs=False)
            reshard = None if reshard is None else bool(reshard)  # A number is one of the other parameters' ranks.
        # A number: torch 2.11 to 2.15 reshards over fewer ranks along dim 0 only.
        in_part = reshard is not None and not isinstance(reshard, bool)

        def placement(parameter: nn.Parameter) -> Shard | None:
            return None if in_part else Shard(shard_dim(parameter.shape, sharers.size, of_experts))

        given = {name: parameter for name, parameter in part.named_parameters() if not isinstance(parameter, DTensor)}
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=precision,
            offload_policy=policy,
            ignored_params=ignored,
            shard_placement_fn=placement,
        )
        sharded: Any = part
        complete_gradients(sharded)
        self.copies += [GatheredCopies(part, group, self._record_write) for group in own_groups(state_of(sharded))]
        names = {id(parameter): plain_name(name) for name, parameter in self.module.named_parameters()}
        for name, parameter in part.named_parameters():
            if name in given and given[name] is not parameter:
                move_hooks(given[name], parameter)
                self._replaced[names[id(parameter)]] = weakref.ref(given[name])
        if self.device.type == "cpu" and backend_of(self.sharers.group, self.device) == "gloo":
            sharded.set_custom_all_gather(PairwiseAllGather(sharers))
            sharded.set_custom_reduce_scatter(PairwiseReduceScatter(sharers))
        elif any(parameter.is_complex() for parameter in trained.values()):
            sharded.set_custom_reduce_scatter(ComplexReduceScatter())

    def _has_experts(self, part: nn.Module) -> bool:
        """Returns whether a unit is a module of experts that `ep` divides."""
        return any(part is self.module.get_submodule(name) for name in self.layout.expert_modules)

    def _broadcast_params(self, part: nn.Module) -> None:
        """Broadcasts the unsharded parameters and buffers from the first data-parallel rank to the others."""
        data = self._expert_data if self._has_experts(part) else self._data
        for tensor in [*self._params_here(part), *part.buffers()]:
            if isinstance(tensor, DTensor) or id(tensor) in self._elsewhere:
                continue
            value = tensor.data.to(self.device).contiguous()
            data.broadcast(value)
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

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function that uses the module with parameters gathered; returns its result."""
        if not self.options.whole_steps:
            for root in self._sharded_roots():
                begin_root(root)
            return function(*args, **kwargs)

        def call(*given: Any, **named: Any) -> Any:
            for copies in self.kept:
                copies.unit.unshard()
            return function(*given, **named)

        return self.roots[0](call, *args, **kwargs)

    def keep(self, copies: GatheredCopies) -> None:
        """Gathers parameters now, and for the full length of later steps."""
        if copies not in self.kept:
            self.kept.append(copies)
            copies.keep()
        copies.unit.unshard()

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a step that gathers what it uses outside of a unit's forward, there and in later steps.

        All ranks take the same steps, so they gather the same parameters in the same order.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            with ShardUse(self.copies, self.keep):
                return function(*args, **kwargs)

        return call

    @property
    def compares_all(self) -> bool:
        """Whether all copies are recorded; otherwise those that are written for the first time."""
        return self._compares_all

    @compares_all.setter
    def compares_all(self, every: bool) -> None:
        self._compares_all = every
        for copies in self.copies:
            copies.reports_all = every

    def finish_backward(self) -> None:
        """Reduces the gradients of gathered parameters that FSDP2 has not seen a backward of.

        These are kept ones; and by hand those that a module's forward has gathered, whose outputs another loss uses.
        """
        for copies in self.kept if self.options.whole_steps else self.copies:
            if copies in self.kept or any(copy.grad is not None for _, copy in copies.pairs):
                copies.finish_backward()

    def check_writes(self) -> None:
        """Checks that all ranks have written the same to parameters; a collective call.

        Raises:
            DloError: They have not.
        """
        for copies in self.copies if self.compares_all else ():
            for shard, copy in copies.pairs:
                self._record_write(shard, copy, False)
        self.written.check(self._averaging)

    def _record_write(self, shard: nn.Parameter, copy: nn.Parameter, is_written: bool) -> None:
        name = self._names.get(id(shard))
        if name is None or name in self.layout.experts:
            return
        if self.compares_all or (is_written and name not in self._compared):
            self.written.add(name, copy)
        if is_written:
            self._compared.add(name)

    def call_with_backwards(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that uses the module and runs backwards itself; returns its result.

        The parameters outside units stay gathered for the backward of the result.
        """

        def run(*given: Any) -> Any:
            step_output = function(*given)
            for root in self._sharded_roots() if self.options.whole_steps else ():
                resume_forward(root)
            return step_output

        return self.call(run, *args)

    def gather_roots(self) -> None:
        """Gathers the parameters outside units, for code that calls the units without a step's root."""
        for root in self._sharded_roots():
            begin_root(root)
            root.unshard()

    def reduce_accumulated(self) -> None:
        """Ends backwards that have accumulated gradients: reduces and frees, as far as these are set."""
        for root in self._sharded_roots():
            reduce_accumulated(root)

    def set_keep_gathered(self, enabled: bool) -> None:
        """Sets whether the next backward passes leave parameters gathered, for others of the same step."""
        if enabled != self._keeps_gathered:
            self._keeps_gathered = enabled
            for root in self._sharded_roots():
                root.set_reshard_after_backward(not enabled)

    def set_sync(self, enabled: bool) -> None:
        """Sets whether the next backward passes reduce gradients, or accumulate them unreduced on each rank."""
        if enabled != self._syncs:
            self._syncs = enabled
            for root in self._sharded_roots():
                root.set_requires_gradient_sync(enabled)

    def accumulate_gradients(self) -> None:
        """Adds gradients that were computed after their unit's backward to those of the step, as FSDP accumulates."""
        for root in self._sharded_roots():
            accumulate_gradients(root)

    def reshard(self) -> None:
        """Frees the gathered parameters; the next use gathers the shards again."""
        for copies in self.copies:
            copies.group.reshard()

    def refresh(self) -> None:
        """Frees the gathered parameters, or gathers master weights, after the shards were written from outside.

        With master weights it is a collective call.
        """
        for copies in self.copies:
            copies.keeps_writes = False  # The shards have newer values.
        self.reshard()
        for copies in self.copies:
            copies.keeps_writes = True
        if self.masters is not None:
            self.masters.all_gather(self.device)

    def shards(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this rank's shards of a ``state_dict`` with plain names, without tensors of other stages."""
        masters = {} if self.masters is None else dict(self.masters.of_state(self.module))
        slices, elsewhere = self.layout.slices, self.layout.other_stages
        held = {name: masters.get(name, value) for name, value in state.items() if name not in elsewhere}
        return {name: attach_slice(value, slices.get(name)) for name, value in held.items()}

    def _sharded_roots(self) -> list[Any]:
        return [root for root in self.roots if isinstance(root, FSDPModule)]

    def reset(self) -> None:
        """Resets the state of a step that raised, so that another can be tried."""
        for root in self._sharded_roots():
            drop_step_state(root)
        self.reshard()

    def mean(self, tensor: Tensor, of_experts: bool = False) -> Tensor:
        """Averages a tensor over the ranks that average this part of the model's gradients, in place.

        Args:
            tensor: Tensor.
            of_experts: Whether the part is this rank's experts, where `ep` divides them.
        """
        ranks = self._expert_averaging if of_experts else self._averaging
        return ranks.sum(tensor).div_(ranks.size)

    def average_copies(self, shard: Tensor) -> None:
        """Averages a shard over the copies of the model, in place, where each copy trains by itself."""
        if self.groups.separate_copies:
            copies = Communicator(self.groups.group("dp_replicate"))
            shard.copy_(copies.sum(shard.to(self.device, copy=True)).div_(copies.size))

    def any_rank(self, flags: list[bool], *, of_all_copies: bool = False) -> list[bool]:
        """Returns, for each flag, whether it is true on any rank that averages gradients with this one.

        Args:
            flags: Flags of this rank.
            of_all_copies: Whether to ask the ranks of copies that train by themselves too.
        """
        ranks = self._data if of_all_copies else self._averaging
        on_any_rank = ranks.maximum(torch.tensor(flags, dtype=torch.uint8, device=self.device))
        return [bool(flag) for flag in on_any_rank.tolist()]

    @torch.no_grad()
    def reduce_partial(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """All-reduces those of some gradients that are partial over tensor parallelism, in place.

        Args:
            gradients: Gradients by parameter name; None for those of all parameters.
        """
        if gradients is None:
            gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        names = [name for name in self.parameters if name in self.layout.partial and name in gradients]
        parts = [local_tensor(gradients[name]) for name in names]
        if not parts:
            return
        joined = self.tensor_parallel.sum(torch.cat([part.reshape(-1) for part in parts]))
        for part, total in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))

    def share_buffers(self) -> None:
        """Broadcasts buffers, such as norms' statistics, from the first data-parallel rank to the others."""
        for buffer in self.module.buffers():
            if not isinstance(buffer, DTensor) and not buffer.is_meta:
                self._data.broadcast(buffer)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Averages the gradients of replicated parameters over the data-parallel ranks; missing ones count as 0.

        FSDP2 averages the others: all but scalars, unless :attr:`is_replicated`.
        """
        if not self.is_replicated:
            self._average_scalars()
            return
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        has = self.any_rank([parameter.grad is not None for parameter in trained])
        for parameter, wanted in zip(trained, has, strict=True):
            if wanted and parameter.grad is None:
                parameter.grad = like_gradient(parameter)
        self.average({name: p.grad for name, p in self.parameters.items() if p.requires_grad and p.grad is not None})

    @torch.no_grad()
    def average(self, gradients: Mapping[str, Tensor]) -> None:
        """Averages full gradients over the data-parallel ranks, in place, in buckets of one dtype.

        Args:
            gradients: Gradients by parameter name.
        """
        alike: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for name, gradient in gradients.items() if self.is_replicated else ():
            alike.setdefault((gradient.dtype, name in self.layout.experts), []).append(gradient)
        for (_, of_experts), same in alike.items():
            for bucket in _buckets(same):
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                sent = self.options.policy.reduce_dtype
                if sent is not None and sent.itemsize < flat.element_size() and not flat.is_complex():
                    flat = flat.to(sent)
                joined = self.mean(flat, of_experts)
                for gradient, mean in zip(bucket, joined.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(mean.view_as(gradient))

    @torch.no_grad()
    def _average_scalars(self) -> None:
        """Averages the gradients of scalar parameters, which are replicated; missing gradients count as 0."""
        scalars = [parameter for parameter in self._scalars if parameter.requires_grad]
        if not scalars:
            return
        for parameter in scalars:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        wide = functools.reduce(torch.promote_types, (parameter.dtype for parameter in scalars), torch.float32)
        joined = self._averaging.sum(torch.stack([p.grad.to(wide) for p in scalars if p.grad is not None]))
        for parameter, mean in zip(scalars, joined / self._averaging.size, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(mean if parameter.is_complex() or not mean.is_complex() else mean.real)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields tensors in lists of about :data:`_BUCKET` elements."""
    bucket, elements = list[Tensor](), 0
    for tensor in tensors:
        bucket.append(tensor)
        elements += tensor.numel()
        if elements >= _BUCKET:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket


def _shards_integers(mesh: DeviceMesh) -> bool:
    """Returns whether FSDP2 can shard integer parameters; torch 2.11 asks for their gradients, and raises."""
    probe = nn.Module()
    probe.integers = nn.Parameter(torch.zeros(mesh.size(), dtype=torch.uint8, device=mesh.device_type), False)
    try:
        fully_shard(probe, mesh=mesh)
    except RuntimeError:
        return False
    return True


def check_reshard(reshard_after_forward: bool | int | None, shard: int) -> None:
    """Checks the number of ranks over which parameters are resharded after forward.

    Raises:
        DloError: The number is not a divisor of ``shard`` between 1 and ``shard``.
    """
    possible = [size for size in range(2, shard) if shard % size == 0]
    if reshard_after_forward not in (None, *possible) and not isinstance(reshard_after_forward, bool):
        raise DloError(
            f"reshard_after_forward must be a bool or a divisor of the {shard} ranks that share a copy, other than 1"
            f" and {shard}, got {reshard_after_forward}; use {''.join(f'{size}, ' for size in possible)}true or false"
        )


def local_shard(whole: Tensor, parameter: Tensor) -> Tensor:
    """Returns this rank's shard of a full tensor of a parameter's shape."""
    if not isinstance(parameter, DTensor):
        return whole
    boxes = [box for box, _ in held_boxes(parameter.detach())]
    return slice_view(whole, whole_box(whole.shape), boxes[0]) if boxes else torch.empty_like(local_tensor(parameter))


def separable_units(module: nn.Module, units: Iterable[str]) -> list[str]:
    """Returns the units that share no parameter with anything outside them, the innermost first.

    A unit with a parameter that is tied to another unit, or to a module outside the units, belongs to the root: FSDP2
    would shard the parameter once for each unit, and untie it.
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


def match_units(module: nn.Module, patterns: list[str]) -> list[str]:
    """Returns the names of the modules that a config's ``units`` match.

    Raises:
        DloError: A pattern matches nothing, or a container, which is never called.
    """
    names = [name for name, _ in module.named_modules() if name]
    units: list[str] = []
    for pattern in patterns:
        matches = ParallelPlan(blocks=(pattern,)).block_names(module)
        if not matches:
            raise DloError(
                f"units must name modules, got '{pattern}', which matches none{did_you_mean(pattern, names)}"
            )
        container = next((n for n in matches if isinstance(module.get_submodule(n), CONTAINERS)), None)
        if container is not None:
            raise DloError(
                "units must name modules that are called, since a call gathers them, got"
                f" {type(module.get_submodule(container)).__name__} '{container}'; name its modules: '{container}.*'"
            )
        units += matches
    return list(dict.fromkeys(units))


def find_roots(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules with parameters that can be called.

    Raises:
        DloError: The module itself has parameters, which nothing would gather.
    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise DloError(
            "parameters under FSDP with manual optimization must be in submodules, whose calls gather them, got"
            f" {', '.join(own[:5])} in {type(module).__name__} itself; put them into a module of their own"
        )
    roots: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            roots += find_roots(child)
        elif next(child.parameters(), None) is not None:
            roots.append(child)
    return roots
