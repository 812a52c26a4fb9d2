"""ZeRO engine: partitions optimizer state, gradients and parameters over ranks, in stages 1 to 3.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054. ZeRO-Offload: Democratizing Billion-Scale Model Training. Ren et al., 2021, arXiv 2101.06840.

One step with N ranks and psi parameters:

- Stages 1 and 2: when a bucket's gradients are complete in backward, they are reduce-scattered (psi elements in all),
  and each rank keeps its 1/N. The optimizer steps this rank's shard, which replaces the parameters in its parameter
  groups. Then the new values are all-gathered (psi); the next forward waits for them unit by unit
  (:mod:`dlo_plugins.parallel.zero.unit_gathering`). Stage 1 keeps full gradients and reduces them at the last
  micro-batch of an accumulation; stage 2 reduces those of each micro-batch and keeps 1/N.
- Stage 3: parameters are kept as 1/N too (:mod:`dlo_plugins.parallel.zero.unit_gathering`): two all-gathers of psi,
  one in forward and one in backward, and the reduce-scatter.

Departures from the paper: shards are cut anywhere, also inside a parameter, so that each is exactly 1/N. Parameters in
single precision have no master copy. Where parameters are in half precision, gradients are summed and kept in single
precision, 4 psi / N bytes instead of the paper's 2; and stage 1 too reduces those of each micro-batch, because half
precision is too coarse to accumulate them in.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.meta_init import Initialiser
from dlo_framework.distributed.optimizer_steps import prefer_fused
from dlo_framework.errors import DloError, shown_names
from dlo_framework.local_memory import memory_of
from dlo_framework.norms import collect_gradients, total_norm
from dlo_framework.placed_model import Context, PlacedModel
from dlo_framework.shards import FlatShard, Shard
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.parallel.gathered_dtype import find_batch_norms
from dlo_plugins.parallel.optimizer_probe import probe_optimizer
from dlo_plugins.parallel.optimizer_shards import (
    ElementwiseShard,
    FullTensorShard,
    OptimizerShard,
    patch_global_norm,
)
from dlo_plugins.parallel.stepped_gradients import check_groups, gradients_message
from dlo_plugins.parallel.stochastic_rounding import StochasticSteps
from dlo_plugins.parallel.zero.flat_group import FlatGroup
from dlo_plugins.parallel.zero.gradient_reduction import GradientReducer
from dlo_plugins.parallel.zero.unit_gathering import GatherOverlap, Unit, UnitGatherer


@dataclass(frozen=True)
class ZeroOptions:
    """Options of a ZeRO engine.

    Attributes:
        stage: Stage of ZeRO: 1 partitions optimizer state, 2 gradients too, 3 parameters too.
        bucket_elements: Maximum number of elements of a bucket of stages 1 and 2, unless one parameter has more.
        offload_optimizer: Whether gradient shards and optimizer state are in CPU memory, and the CPU steps.
        offload_parameters: Whether parameter shards, those of frozen parameters too, are in CPU memory (stage 3).
        find_unused: Whether parameters may have no gradient.
        gathered_dtype: Dtype in which parameters in single precision are gathered and used, except batch norms'; None
            for their own dtype.
        reduced_dtype: Dtype in which their gradients are summed; None for their own dtype.
        sent_dtype: Dtype in which all gradients in wider dtypes are sent and summed; None for no such dtype.
        rounding: Steps of bf16 parameters without master weights, whose gradients are kept in single precision; None
            where there are none.
    """

    stage: int
    bucket_elements: int
    offload_optimizer: bool = False
    offload_parameters: bool = False
    find_unused: bool = False
    gathered_dtype: torch.dtype | None = None
    reduced_dtype: torch.dtype | None = None
    sent_dtype: torch.dtype | None = None
    rounding: StochasticSteps | None = None

    @property
    def reduces_each(self) -> bool:
        """Whether the gradients of each micro-batch are reduced, instead of their sum over an accumulation."""
        return self.stage > 1 or self.gathered_dtype is not None or self.rounding is not None


class ZeroEngine:
    """Partitions a module's parameters, and its optimizers' state and gradients, over ranks.

    Args:
        module: Module that trains; its parameters keep their identity and shape, their data move into flat buffers.
        optimizers: Optimizers of the module's parameters; their parameter groups get this rank's shard instead.
        units: Names of the modules that are gathered together in stage 3, and wait for their parameters in stages 1
            and 2; parameters of no unit belong to the root.
        communicator: Communicator of the ranks.
        device: Device on which this rank computes.
        options: Stage and other options.
        initialise: Initialiser of units on the meta device (stage 3); with it no rank ever holds the full model.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[Optimizer],
        units: list[str],
        communicator: Communicator,
        device: torch.device,
        options: ZeroOptions,
        initialise: Initialiser | None = None,
    ) -> None:
        self.communicator, self.device, self.options = communicator, device, options
        self.gathering: UnitGatherer | None = None
        self.gather_overlap: GatherOverlap | None = None
        self._index_params(module, optimizers)
        if options.stage == 3:
            built = self._build_units(module, units, initialise)
            if initialise is not None:
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    group["params"] = [initialise.replacement_of(parameter) for parameter in group["params"]]
                self._index_params(module, optimizers)
            for unit in built:
                unit.kept |= options.find_unused  # Ranks may use different units: all take part at a step's ends.
            self.groups = [group for unit in built for group in unit.groups]
            self.gathering = UnitGatherer(built, module)
        else:
            self.groups = self._buckets(module)
            self.gather_overlap = GatherOverlap(module, units, self.groups)
        self._frozen = {self._names[id(p)]: p for p in module.parameters() if not p.requires_grad}
        self._by_name = {name: (group, n) for group in self.groups for n, name in enumerate(group.names)}
        trained = [group for group in self.groups if group.trains]
        self.reducer = GradientReducer(
            list(reversed(trained)) if options.stage == 3 else trained,
            communicator,
            options.find_unused,
            self.gathering.release if self.gathering else None,
            at_end=options.find_unused and self.gathering is not None,
        )
        self.shares = [self._make_share(number, optimizer) for number, optimizer in enumerate(optimizers)]
        self._optimizers = optimizers
        self._window_open = self._by_hand = False
        self.sync = True  # whether the running backward is the last of its accumulation
        self._ready: Callable[[list[Tensor]], None] | None = None  # steps pieces in backward
        self._arriving: deque[FlatGroup] = deque()  # groups whose gradients are being copied, then stepped

    # --- building ------------------------------------------------------------------------------------------

    def _index_params(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        self._names = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
        self._exact = {id(parameter) for norm in find_batch_norms(module) for parameter in norm.parameters()}
        self._stepped_by: dict[int, int] = {}
        for number, optimizer in enumerate(optimizers):
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                other = self._stepped_by.setdefault(id(parameter), number)
                if other != number:
                    raise DloError(
                        f"each parameter must be stepped by one optimizer under ZeRO, got {self._names[id(parameter)]}"
                        f" in optimizers {other} ({type(optimizers[other]).__name__}) and {number}"
                        f" ({type(optimizer).__name__}); use strategy fsdp or ddp"
                    )

    def _group(self, named: dict[str, nn.Parameter]) -> FlatGroup:
        cpu, stage3 = torch.device("cpu"), self.options.stage == 3
        gathered = self._gathered_dtype(next(iter(named.values())))
        step_device = cpu if self.options.offload_optimizer else self.device
        shard_device = step_device
        if stage3:
            shard_device = cpu if self.options.offload_parameters else self.device
            if not next(iter(named.values())).requires_grad:
                step_device = shard_device  # Frozen parameters are never stepped.
        reduced = None if gathered is None else self.options.reduced_dtype
        kept = None
        if self.options.rounding is not None and next(iter(named.values())).dtype == torch.bfloat16:
            kept = torch.float32
            reduced = self.options.reduced_dtype or kept
        dtype = next(iter(named.values())).dtype
        if self.options.sent_dtype is not None and dtype.itemsize > 2 and not dtype.is_complex:
            reduced = self.options.sent_dtype
        return FlatGroup(
            named,
            self.communicator,
            self.device,
            keep_full=not stage3,
            step_device=step_device,
            shard_device=shard_device,
            gathered_dtype=gathered,
            reduced_dtype=reduced,
            gradient_dtype=kept,
        )

    def _gathered_dtype(self, parameter: nn.Parameter) -> torch.dtype | None:
        """Returns the dtype in which a parameter is gathered; None for its own."""
        exact = parameter.dtype != torch.float32 or id(parameter) in self._exact
        return None if exact else self.options.gathered_dtype

    def _group_key(self, parameter: nn.Parameter) -> tuple[object, ...]:
        """Returns the properties that the parameters of one group must share."""
        dtypes = parameter.dtype, self._gathered_dtype(parameter)
        return *dtypes, parameter.requires_grad, self._stepped_by.get(id(parameter))

    def _buckets(self, module: nn.Module) -> list[FlatGroup]:
        """Groups the trainable parameters into buckets, last first, as backward computes their gradients."""
        buckets: list[dict[str, nn.Parameter]] = []
        open_ones: dict[object, dict[str, nn.Parameter]] = {}
        for parameter in reversed(list(module.parameters())):
            if not parameter.requires_grad:
                continue
            kind, bucket = self._group_key(parameter), None
            bucket = open_ones.get(kind)
            if bucket is not None:
                held = sum(other.numel() for other in bucket.values())
                bucket = bucket if held + parameter.numel() <= self.options.bucket_elements else None
            if bucket is None:
                bucket = open_ones[kind] = {}
                buckets.append(bucket)
            bucket[self._names[id(parameter)]] = parameter
        return [self._group(bucket) for bucket in buckets]

    def _build_units(self, module: nn.Module, names: list[str], initialise: Initialiser | None) -> list[Unit]:
        """Groups the parameters by unit, the root first; those of several units or of none belong to the root."""
        homes: dict[int, set[str]] = {}
        for full_name, parameter in module.named_parameters(remove_duplicate=False):
            home = next((name for name in names if full_name.startswith(name + ".")), "")
            homes.setdefault(id(parameter), set()).add(home)
        by_unit: dict[str, dict[object, dict[str, nn.Parameter]]] = {"": {}, **{name: {} for name in names}}
        for parameter in module.parameters():
            where = homes[id(parameter)]
            unit = by_unit[next(iter(where)) if len(where) == 1 else ""]
            unit.setdefault(self._group_key(parameter), {})[self._names[id(parameter)]] = parameter
        units = []
        for name, kinds in reversed(by_unit.items()):  # Children are initialised before their parents.
            own = module.get_submodule(name)
            if initialise is not None:
                initialise(own, name)
                kinds = {
                    kind: {of: initialise.replacement_of(parameter) for of, parameter in named.items()}
                    for kind, named in kinds.items()
                }
            if kinds or not name:
                units.append(Unit(name, own, [self._group(named) for named in kinds.values()]))
        return units[::-1]

    def _make_share(self, number: int, optimizer: Optimizer) -> OptimizerShard[FlatGroup]:
        groups = [g for g in self.groups if g.trains and self._stepped_by.get(id(g.parameters[0])) == number]
        if not groups:
            raise DloError(
                f"an optimizer under ZeRO must have trainable parameters, got {type(optimizer).__name__} without any;"
                " set requires_grad of some, or leave the optimizer out"
            )
        kind = probe_optimizer(optimizer)
        share = (ElementwiseShard if kind == "elementwise" else FullTensorShard)(groups, self.communicator)
        ranks = self.communicator.group or dist.group.WORLD
        if kind == "all" and not patch_global_norm(
            optimizer, lambda: total_norm(collect_gradients(optimizer), self.device, ranks)
        ):
            raise DloError(
                "an optimizer under ZeRO must update each tensor without the others, got"
                f" {type(optimizer).__name__}; use strategy ddp or fsdp with it"
            )
        share.replace_params(optimizer, self._names)
        prefer_fused(optimizer, on_cpu=any(group.step_device != self.device for group in groups))
        optimizer.register_step_pre_hook(lambda _, args, kwargs: self._before_step(share, optimizer, args, kwargs))
        if self.options.rounding is not None:
            self.options.rounding.attach(optimizer, share.local_params, share.as_shard)
        optimizer.register_step_post_hook(lambda *_: self._after_step(share))
        return share

    # --- one step ------------------------------------------------------------------------------------------

    def check_params(self) -> None:
        """Checks what was written to the parameters since the last step; called before each training step.

        Stage 3 checks as it gathers them.

        Raises:
            DloError: Someone has assigned to the ``data`` of a parameter.
        """
        for group in self.groups if self.gather_overlap else ():
            group.check_params()

    def before_backward(self, automatic: bool) -> None:
        """Prepares the reduction; called before each backward.

        Args:
            automatic: Whether Lightning steps the optimizers; then ``sync`` marks the end of each accumulation.

        Raises:
            DloError: A parameter trains that was frozen when parameters were partitioned, so that no rank owns it.
        """
        thawed = sorted(name for name, parameter in self._frozen.items() if parameter.requires_grad)
        if thawed:
            raise DloError(
                f"parameters under ZeRO must train from the start of the run, got {shown_names(thawed)} unfrozen"
                " since; put it in a parameter group with lr 0 from the start, or start a second run from this one's"
                " checkpoint"
            )
        if not self._window_open:
            self.drop_gradients()
        elif not automatic:
            self._drop_used_gradients()
        self._window_open = self.reducer.announced = True
        self._by_hand = not automatic
        self._arriving.clear()  # of a backward that raised
        # Stage 1 accumulates micro-batches in the parameters' own gradients, and reduces them once.
        self.reducer.enabled = self.sync or self.options.reduces_each
        self.reducer.skipped = {
            id(group)
            for share in self.shares
            if not any(tensor.requires_grad for tensor in share.stepped_tensors)
            for group in share.groups
        }
        if self.gather_overlap:
            self.gather_overlap.finish()
        if self.reducer.enabled:
            self.reducer.begin(accumulated=not self.options.reduces_each)
        if self.gathering:
            self.gathering.in_backward = True

    def after_backward(self, automatic: bool) -> None:
        """Finishes the reduction after each backward, and sets the gradients of the optimizer shards."""
        self.reducer.announced = False
        if self.reducer.enabled:
            self.reducer.finish(partial=not automatic)
        if self.gathering:
            self.gathering.in_backward = False
            self.gathering.release_all()
            if not automatic:
                self.gathering.begin_step()  # The step goes on.
        while self._arriving:
            self._step_group(self._arriving.popleft())
        for group in self.groups:
            group.finish_gradient()
        if self.sync:
            self._window_open = not automatic
            for share in self.shares if self._ready is None else ():
                share.set_grads(self.reducer.used)
                share.record_grads()

    def _before_step(self, share: OptimizerShard[FlatGroup], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        check_groups(optimizer, self._names)
        has_closure = any(callable(value) for value in (*args[1:], *kwargs.values()))  # It loads them inside.
        if (self._by_hand or not has_closure) and not self._ready:
            share.load_params()

    def _after_step(self, share: OptimizerShard[FlatGroup]) -> None:
        changed = [
            name for g in share.groups for name, p in zip(g.names, g.parameters, strict=True) if p.grad is not None
        ]
        if changed:
            raise DloError(gradients_message(changed))
        copied = (
            []
            if self._ready
            else [g for g in share.groups if not g.shares_memory or isinstance(share, FullTensorShard)]
        )
        late = [name for group in copied for name in group.find_written()]
        if late:
            raise DloError(
                "parameters under ZeRO must not be written between their backward and their step, got"
                f" {shown_names(late)} written; write in training_step, or in on_train_batch_end in stages 1 and 2"
            )
        share.all_gather_params()
        if self.gather_overlap:
            self.gather_overlap.after_step()
        else:
            for group in share.groups:
                if group.gathered:
                    group.finish_gather()
        share.stepped = True

    def watch_gradients(self, ready: Callable[[list[Tensor]], None] | None) -> None:
        """Calls a function in backward with this rank's tensors of each group whose gradients are reduced.

        In stages 1 and 2 the pieces are memory of the parameters. A group is reduced once all of its gradients are
        complete; the operations that compute these are the ones that read the parameters, so that the rest of backward
        reads none of the group. One that does raises autograd's error about saved tensors that were changed in place,
        as in one process. The other ranks' pieces are all-gathered after backward, as for the ordinary step.

        Where gradients are copied to the CPU, they are stepped as they arrive, while the device computes the gradients
        that follow. Full tensors are stepped by their owners, in exchanges between all ranks: with such copies at the
        next group's reduction, which comes at the same place on all ranks.
        """
        self._ready = self.reducer.on_gradient = None
        if ready is None:
            return
        assert len(self.shares) == 1, "the callback refuses several optimizers"
        self._ready = ready if self.options.rounding is None else self.options.rounding.around(ready)
        self.reducer.on_gradient = self._step_arrived

    def _step_arrived(self, group: FlatGroup) -> None:
        """Steps the groups whose gradients have arrived, in the order of their reduction."""
        self._arriving.append(group)
        if not isinstance(self.shares[0], FullTensorShard):
            while self._arriving and self._arriving[0].gradient_arrived:
                self._step_group(self._arriving.popleft())
            return
        copied = group.step_device != self.device
        while len(self._arriving) > int(copied):
            self._step_group(self._arriving.popleft())

    def _step_group(self, group: FlatGroup) -> None:
        """Steps this rank's tensors of a group, and drops its gradients."""
        assert self._ready is not None
        (share,) = self.shares
        group.finish_gradient()
        if group.gradient is None:
            return
        group.store_writes()
        group.mirrored = -1
        if isinstance(share, FullTensorShard):
            share.step_group(group, self._ready)
        else:
            self._step_pieces(share, group)
        group.drop_gradient()
        if group.shares_memory:
            torch.autograd.graph.increment_version(group.parameters)

    def _step_pieces(self, share: OptimizerShard[FlatGroup], group: FlatGroup) -> None:
        """Steps this rank's pieces of a group's parameters."""
        assert self._ready is not None
        group.load_params()
        pieces = []
        for number, gradient in zip(group.owned, group.piece_gradients(), strict=True):
            piece = share.local_params[group.names[number]]
            piece.grad = gradient.view_as(piece)
            pieces.append(piece)
        self._ready(pieces)
        group.store_step()

    def finish_step(self) -> None:
        """Waits for the last step's collectives and copies; then parameters and shards can be read and written."""
        self._finish_exchanges()
        for group in self.groups:
            group.store_writes()

    def _finish_exchanges(self) -> None:
        if self.gather_overlap:
            self.gather_overlap.finish()
        for group in self.groups:
            group.finish_copies()

    def drop_gradients(self) -> None:
        """Drops the gradients of the last accumulation."""
        self.reducer.used.clear()
        for share in self.shares:
            share.reset()
        for group in self.groups:
            group.gradient = None

    def _drop_used_gradients(self) -> None:
        """Drops the gradients of each optimizer that has stepped or called ``zero_grad``; others keep accumulating.

        A rank that owns nothing of an optimizer cannot see ``zero_grad``, so the ranks agree by an all-reduce.
        """
        grads_dropped = torch.tensor(
            [share.grads_dropped() for share in self.shares], dtype=torch.uint8, device=self.device
        )
        for share, dropped in zip(self.shares, self.communicator.maximum(grads_dropped).tolist(), strict=True):
            if share.stepped or dropped:
                share.reset()
                for group in share.groups:
                    self.reducer.used.difference_update(group.names)
                    group.gradient = None

    # --- state ---------------------------------------------------------------------------------------------

    @property
    def trained_names(self) -> dict[int, str]:
        """Names of the trained parameters by id."""
        return {id(p): name for g in self.groups if g.trains for name, p in zip(g.names, g.parameters, strict=True)}

    @property
    def holds_shards(self) -> bool:
        """Whether weights are saved from shards: in stage 3, and where there are master weights."""
        return self.gathering is not None or any(group.has_master_weights for group in self.groups)

    def tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the tensors that an optimizer steps on this rank, by parameter name."""
        return self._share(optimizer).local_params

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the parameter names of each parameter group, those of other ranks' shards too."""
        return self._share(optimizer).group_names

    def as_shard(self, name: str, value: Tensor) -> Shard:
        """Returns a state tensor as a shard of the tensor in the parameter's shape."""
        return self._share_of(name).as_shard(name, value)

    def empty_shard(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns an uninitialised shard of a state tensor for this rank."""
        return self._share_of(name).empty_shard(name, shape, dtype)

    def _share(self, optimizer: Optimizer) -> OptimizerShard[FlatGroup]:
        return next(share for share, own in zip(self.shares, self._optimizers, strict=True) if own is optimizer)

    def _share_of(self, name: str) -> OptimizerShard[FlatGroup]:
        return next(share for share in self.shares if name in share.shapes)

    def shard(self, name: str) -> FlatShard | None:
        """Returns this rank's shard of a parameter; None where every rank has the full tensor in its own dtype."""
        entry = self._by_name.get(name)
        if entry is None or (entry[0].keep_full and not entry[0].has_master_weights):
            return None
        group, number = entry
        group.finish_copies()
        for piece, owned in zip(group.pieces, group.owned, strict=True):
            if owned == number:
                return FlatShard(piece.data.detach(), piece.shape, piece.start)
        parameter = group.parameters[number]
        return FlatShard(torch.empty(0, dtype=group.dtype, device=group.shard_device), parameter.shape, 0)

    def gradient_shards(self) -> dict[str, FlatShard]:
        """Returns this rank's shards of the gradients accumulated so far, by parameter."""
        shards = {}
        for group in self.groups:
            if group.gradient is not None:
                for piece, number, gradient in zip(group.pieces, group.owned, group.piece_gradients(), strict=True):
                    shards[group.names[number]] = FlatShard(gradient, piece.shape, piece.start)
        return shards

    def open_window(self, names: Iterable[str]) -> dict[str, FlatShard]:
        """Reopens a restored accumulation; returns zeroed gradient shards of this rank, by parameter."""
        self.reducer.used = set(names)
        self._window_open = True
        for share in self.shares:
            share.reset()
        for group in self.groups:
            if self.reducer.used.intersection(group.names):
                group.gradient = torch.zeros_like(group.shard, dtype=group.gradient_dtype, device=group.step_device)
        return {name: shard for name, shard in self.gradient_shards().items() if name in self.reducer.used}

    def refresh(self) -> None:
        """Synchronises parameters and shards after a write from outside; all ranks must call it.

        In stages 1 and 2 the shards take the parameters' values, unless the shards are master weights, which the
        parameters then take. In stage 3 the gathered parameters are freed, because the shards alone are written to.
        """
        self._finish_exchanges()
        for group in self.groups:
            group.mark_changed()
            if group.keep_full and group.has_master_weights:
                group.all_gather_params()
                group.finish_gather()
            elif group.keep_full:
                own = self.communicator.segment(group.full)
                if own.data_ptr() != group.shard.data_ptr():
                    group.shard.copy_(own)
            elif group.gathered:
                group.free()

    @torch.no_grad()
    def dissolve(self) -> None:
        """Undoes the partition: each parameter becomes a full tensor with memory of its own."""
        self.finish_step()
        for group in self.groups:
            group.dissolve()
        self.reducer.remove()
        for hooks in (self.gathering, self.gather_overlap):
            for handle in hooks.handles if hooks else ():
                handle.remove()

    def count_state_bytes(self) -> dict[str, int]:
        """Returns the bytes of parameters, gradients and master weights that this rank holds now."""
        parameters = sum(_bytes(group.full) for group in self.groups)
        apart = [group for group in self.groups if not group.shares_memory]
        parameters += sum(_bytes(group.shard) for group in apart if not group.has_master_weights)
        masters = sum(_bytes(group.shard) for group in apart if group.has_master_weights)
        parameters += sum(group.copy_bytes for group in self.groups)
        gradients = sum(_bytes(group.gradient) for group in self.groups if group.gradient is not None)
        gradients += sum(_bytes(p.grad) for group in self.groups for p in group.parameters if p.grad is not None)
        return {"parameters": parameters, "gradients": gradients, "masters": masters}


def _bytes(tensor: Tensor) -> int:
    return min(tensor.untyped_storage().nbytes(), tensor.nbytes)


class FrozenZero(PlacedModel):
    """Frozen task whose units are gathered for their forward, by a ZeRO engine of its own without optimizers.

    Args:
        task: Task whose parameters the engine has partitioned.
        device: Device on which this rank computes.
        engine: Engine of stage 3.
        context: Context of a forward, such as autocast.
    """

    def __init__(
        self, task: Any, device: torch.device, engine: ZeroEngine, *, context: Context = contextlib.nullcontext
    ) -> None:
        self.engine = engine
        for module in task.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
        super().__init__(task, device, context=context, moved=True)

    @property
    def _gathering(self) -> UnitGatherer:
        assert self.engine.gathering is not None, "the engine is of stage 3"
        return self.engine.gathering

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        self._gathering.begin_step()
        try:
            with self._gathering.watch_step(f"frozen {getattr(function, '__name__', '')}"):
                return function(*args)
        finally:
            self._gathering.release_all()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers the parameters outside of units inside the block."""
        self._gathering.root.start()
        self._gathering.root.finish()
        try:
            yield
        finally:
            self._gathering.root.free()

    def shards(self) -> dict[str, Any]:
        """Returns this rank's shards of the parameters, and the buffers, by name."""
        first_names = {id(p): plain_name(name) for name, p in self.task.named_parameters()}
        with self._gathering.allow_names():
            state = super().shards()
            held = self.task.state_dict(keep_vars=True)
        for name, value in held.items():
            if id(value) in first_names:
                state[plain_name(name)] = self.engine.shard(first_names[id(value)])
        return state

    def refresh(self) -> None:
        """Frees gathered parameters, after the shards have been written to."""
        self.engine.refresh()

    def held_bytes(self) -> int:
        """Returns the bytes of this rank's shards, of what is gathered now, and of the buffers."""
        return self.engine.count_state_bytes()["parameters"] + memory_of(self.task.buffers())
