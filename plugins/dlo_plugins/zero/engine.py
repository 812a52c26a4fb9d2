"""The ZeRO engine: gradients to their owners during backward, a step on what a rank owns, the result to all.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. Rajbhandari, Rasley, Ruwase & He, 2020,
arXiv 1910.02054. ZeRO-Offload: Democratizing Billion-Scale Model Training. Ren et al., 2021, arXiv 2101.06840.

One step, N ranks, psi parameters:

- stages 1 and 2: as each bucket's gradients are complete in backward, they are summed over the ranks, and each rank
  keeps its own 1/N of the sum (reduce-scatter, psi elements in all). The optimizer, whose parameter groups hold this
  rank's share in place of the parameters, steps. Then all ranks send each other the new values (all-gather, psi),
  for which the next forward waits unit by unit (:mod:`dlo_plugins.zero.arrivals`).
  Stage 1 waits with the reduction for the last micro-batch of an accumulation, keeping whole gradients till then;
  stage 2 reduces each micro-batch's and keeps 1/N.
- stage 3: parameters are kept as 1/N too (:mod:`dlo_plugins.zero.gathering`): two all-gathers of psi, one in forward
  and one in backward, and the reduce-scatter.

Departures from the paper: a rank's share is cut anywhere, also inside a parameter, which makes it exactly 1/N; there
is no master copy in single precision beside parameters that are in single precision already; and where parameters are
in half precision, gradients are summed and kept in single precision, 4 psi / N bytes for the paper's 2, and each
micro-batch's are reduced in stage 1 too: half precision is no place to add them up in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from dlo_framework.checkpoint import FlatShard
from dlo_framework.distributed.canonical import clean
from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.fused import prefer_fused
from dlo_framework.distributed.initialise import Initialiser
from dlo_framework.errors import DloError
from dlo_plugins.zero.arrivals import Arrivals
from dlo_plugins.zero.gathering import Gathering, Unit
from dlo_plugins.zero.group import FlatGroup
from dlo_plugins.zero.probe import kind_of
from dlo_plugins.zero.reduction import GradientReducer
from dlo_plugins.zero.shares import PieceShare, Share, TensorShare


@dataclass(frozen=True)
class ZeroOptions:
    """How an engine partitions.

    Attributes:
        stage: 1 optimizer state, 2 gradients too, 3 parameters too.
        bucket_elements: parameters of a bucket of stages 1 and 2, at most, unless one parameter has more.
        offload_optimizer: whether gradient shards and optimizer state live in CPU memory, and the CPU steps.
        offload_parameters: whether parameter shards, of frozen ones too, live in CPU memory (stage 3).
        find_unused: whether parameters may go without a gradient.
        gathered_dtype: what parameters in single precision are gathered and used in, all but batch norms'; None for
            their own dtype.
        reduced_dtype: what their gradients are summed in; None for their own dtype.
    """

    stage: int
    bucket_elements: int
    offload_optimizer: bool = False
    offload_parameters: bool = False
    find_unused: bool = False
    gathered_dtype: torch.dtype | None = None
    reduced_dtype: torch.dtype | None = None

    @property
    def reduces_each(self) -> bool:
        """Whether each micro-batch's gradients are reduced, and not the sum of an accumulation's."""
        return self.stage > 1 or self.gathered_dtype is not None


class ZeroEngine:
    """Partitions a module's parameters, and its optimizers' state and gradients, over ranks.

    Args:
        module: what trains; its parameters keep their identity and shape, their data move into flat buffers.
        optimizers: as configured on the module's parameters; they get this rank's share instead.
        units: names of the modules that are gathered as one in stage 3, and wait for their parameters in stages 1 and
            2; what is in none of them is the root's.
        communicator: the ranks.
        device: where this rank computes.
        options: the stage and the rest.
        initialise: gives units on the meta device their values (stage 3), so that no rank ever holds the whole model.
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
        self.gathering: Gathering | None = None
        self.arrivals: Arrivals | None = None
        self._note(module, optimizers)
        if options.stage == 3:
            built = self._units(module, units, initialise)
            if initialise is not None:
                _put_in_place(optimizers, initialise)
                self._note(module, optimizers)
            self.groups = [group for unit in built for group in unit.groups]
            self.gathering = Gathering(built, module)
        else:
            self.groups = self._buckets(module)
            self.arrivals = Arrivals(module, units, self.groups)
        self._frozen = {self._names[id(p)]: p for p in module.parameters() if not p.requires_grad}
        self._by_name = {name: (group, n) for group in self.groups for n, name in enumerate(group.names)}
        trained = [group for group in self.groups if group.trains]
        self.reducer = GradientReducer(
            list(reversed(trained)) if options.stage == 3 else trained,
            communicator,
            options.find_unused,
            self.gathering.release if self.gathering else None,
        )
        self.shares = [self._share(number, optimizer) for number, optimizer in enumerate(optimizers)]
        self._window_open = False
        self.sync = True  # whether the backward under way is the last of its accumulation

    # --- building ------------------------------------------------------------------------------------------

    def _note(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        self._names = {id(parameter): clean(name) for name, parameter in module.named_parameters()}
        # Its kernels do not take weights in half precision beside statistics in single precision.
        norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        self._exact = {id(parameter) for norm in norms for parameter in norm.parameters()}
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
        home = cpu if self.options.offload_optimizer else self.device
        rests = home
        if stage3:
            rests = cpu if self.options.offload_parameters else self.device
            home = home if next(iter(named.values())).requires_grad else rests  # What is frozen is never stepped.
        reduced = None if gathered is None else self.options.reduced_dtype
        return FlatGroup(
            *(named, self.communicator, self.device),
            keep_whole=not stage3,
            home=home,
            rests=rests,
            gathered_dtype=gathered,
            reduced_dtype=reduced,
        )

    def _gathered_dtype(self, parameter: nn.Parameter) -> torch.dtype | None:
        """Returns what a parameter is gathered in; None for its own dtype."""
        exact = parameter.dtype != torch.float32 or id(parameter) in self._exact
        return None if exact else self.options.gathered_dtype

    def _kind(self, parameter: nn.Parameter) -> tuple[object, ...]:
        """Returns what the parameters of one group have in common."""
        dtypes = parameter.dtype, self._gathered_dtype(parameter)
        return *dtypes, parameter.requires_grad, self._stepped_by.get(id(parameter))

    def _buckets(self, module: nn.Module) -> list[FlatGroup]:
        """Cuts the trainable parameters into buckets, last first: the order in which backward meets them."""
        buckets: list[dict[str, nn.Parameter]] = []
        open_ones: dict[object, dict[str, nn.Parameter]] = {}
        for parameter in reversed(list(module.parameters())):
            if not parameter.requires_grad:
                continue
            kind, bucket = self._kind(parameter), None
            bucket = open_ones.get(kind)
            if bucket is not None:
                held = sum(other.numel() for other in bucket.values())
                bucket = bucket if held + parameter.numel() <= self.options.bucket_elements else None
            if bucket is None:
                bucket = open_ones[kind] = {}
                buckets.append(bucket)
            bucket[self._names[id(parameter)]] = parameter
        return [self._group(bucket) for bucket in buckets]

    def _units(self, module: nn.Module, names: list[str], initialise: Initialiser | None) -> list[Unit]:
        """Groups the parameters by unit, the root first; those of several units, or of none, are the root's."""
        homes: dict[int, set[str]] = {}
        for full_name, parameter in module.named_parameters(remove_duplicate=False):
            home = next((name for name in names if full_name.startswith(name + ".")), "")
            homes.setdefault(id(parameter), set()).add(home)
        by_unit: dict[str, dict[object, dict[str, nn.Parameter]]] = {"": {}, **{name: {} for name in names}}
        for parameter in module.parameters():
            where = homes[id(parameter)]
            unit = by_unit[next(iter(where)) if len(where) == 1 else ""]
            unit.setdefault(self._kind(parameter), {})[self._names[id(parameter)]] = parameter
        units = []
        for name, kinds in reversed(by_unit.items()):  # Modules that hold others get their values after them.
            own = module.get_submodule(name)
            if initialise is not None:
                initialise(own, name)
                kinds = {
                    kind: {of: initialise.now(parameter) for of, parameter in named.items()}
                    for kind, named in kinds.items()
                }
            if kinds or not name:
                units.append(Unit(name, own, [self._group(named) for named in kinds.values()]))
        return units[::-1]

    def _share(self, number: int, optimizer: Optimizer) -> Share:
        groups = [g for g in self.groups if g.trains and self._stepped_by.get(id(g.parameters[0])) == number]
        if not groups:
            raise DloError(f"ZeRO: {type(optimizer).__name__} has no trainable parameters")
        kind = kind_of(optimizer)
        share = (PieceShare if kind == "elementwise" else TensorShare)(groups, self.communicator)
        if kind == "all":
            _take_global_norm(optimizer, self, share)
        share.move_into(optimizer, self._names)
        prefer_fused(optimizer, on_cpu=any(group.home != self.device for group in groups))
        optimizer.register_step_pre_hook(lambda _, args, kwargs: None if _has_closure(args, kwargs) else share.bring())
        optimizer.register_step_post_hook(lambda *_: self._after_step(share))
        return share

    # --- one step ------------------------------------------------------------------------------------------

    def before_backward(self, automatic: bool) -> None:
        """Called before each backward.

        Args:
            automatic: whether Lightning steps the optimizers, and ``sync`` tells the end of each accumulation.

        Raises:
            DloError: if a parameter trains that was frozen when the others were divided: no rank would have its share.
        """
        thawed = sorted(name for name, parameter in self._frozen.items() if parameter.requires_grad)
        if thawed:
            raise DloError(thawed_message(thawed))
        if not self._window_open:
            self.drop_gradients()
        elif not automatic:
            self._drop_what_was_used()
        self._window_open = self.reducer.announced = True
        # Stage 1 adds micro-batches up in the parameters' own gradients, and reduces them once.
        self.reducer.enabled = self.sync or self.options.reduces_each
        self.reducer.skipped = {
            id(group)
            for share in self.shares
            if not any(tensor.requires_grad for tensor in _stepped(share))
            for group in share.groups
        }
        if self.arrivals:
            self.arrivals.finish()
        if self.reducer.enabled:
            self.reducer.begin(accumulated=not self.options.reduces_each)
        if self.gathering:
            self.gathering.in_backward = True

    def after_backward(self, automatic: bool) -> None:
        """Called after each backward: what it reduced is this rank's share of the gradients."""
        self.reducer.announced = False
        if self.reducer.enabled:
            self.reducer.finish(partial=not automatic)
        if self.gathering:
            self.gathering.in_backward = False
            self.gathering.release_all()
            if not automatic:
                self.gathering.enter()  # The step goes on.
        for group in self.groups:
            group.finish_gradient()
        if self.sync:
            self._window_open = not automatic
            for share in self.shares:
                share.give_gradients(self.reducer.used)
                share.note_given()

    def _after_step(self, share: Share) -> None:
        share.publish()
        if self.arrivals:
            self.arrivals.started()
        else:
            for group in share.groups:
                if group.gathered:
                    group.finish_gather()
        share.spent = True

    def finish_step(self) -> None:
        """Waits for what the last step has started: parameters and shards can be read and written then."""
        if self.arrivals:
            self.arrivals.finish()
        for group in self.groups:
            group.finish_copies()

    def drop_gradients(self) -> None:
        """Forgets the gradients of the window that has ended."""
        self.reducer.used.clear()
        for share in self.shares:
            share.forget()
        for group in self.groups:
            group.gradient = None

    def _drop_what_was_used(self) -> None:
        """Forgets the gradients of each optimizer that has stepped, or dropped its own; others go on gathering.

        A rank that owns nothing of an optimizer's cannot see ``zero_grad``, so they tell each other.
        """
        wiped = torch.tensor([share.wiped() for share in self.shares], dtype=torch.uint8, device=self.device)
        for share, dropped in zip(self.shares, self.communicator.maximum(wiped).tolist(), strict=True):
            if share.spent or dropped:
                share.forget()
                for group in share.groups:
                    self.reducer.used.difference_update(group.names)
                    group.gradient = None

    # --- state ---------------------------------------------------------------------------------------------

    @property
    def holds_shards(self) -> bool:
        """Whether weights are saved from shards: in stage 3, and where the parameters are in another precision."""
        return self.gathering is not None or any(group.has_masters for group in self.groups)

    def shard(self, name: str) -> FlatShard | None:
        """Returns this rank's part of a parameter; None of one that every rank has in full, in its own precision."""
        found = self._by_name.get(name)
        if found is None or (found[0].keep_whole and not found[0].has_masters):
            return None
        group, number = found
        group.finish_copies()
        for piece, owned in zip(group.pieces, group.owned, strict=True):
            if owned == number:
                return FlatShard(piece.data.detach(), piece.shape, piece.start)
        parameter = group.parameters[number]
        return FlatShard(torch.empty(0, dtype=group.dtype, device=group.rests), parameter.shape, 0)

    def gradient_shards(self) -> dict[str, FlatShard]:
        """Returns this rank's part of the gradients gathered so far, by parameter."""
        found = {}
        for group in self.groups:
            if group.gradient is not None:
                for piece, number, gradient in zip(group.pieces, group.owned, group.piece_gradients(), strict=True):
                    found[group.names[number]] = FlatShard(gradient, piece.shape, piece.start)
        return found

    def open_window(self, names: Iterable[str]) -> dict[str, FlatShard]:
        """Returns room for the gradients of an accumulation that goes on: this rank's part of each."""
        self.reducer.used = set(names)
        self._window_open = True
        for share in self.shares:
            share.forget()
        for group in self.groups:
            if self.reducer.used.intersection(group.names):
                group.gradient = torch.zeros_like(group.shard, device=group.home)
        return {name: shard for name, shard in self.gradient_shards().items() if name in self.reducer.used}

    def refresh(self) -> None:
        """Takes the parameters' values, changed from outside, into the shards, or the shards' into the parameters.

        In stages 1 and 2 the parameters are what was changed, unless the shards are master weights; in stage 3 the
        shards are all there is. Called on all ranks.
        """
        self.finish_step()
        for group in self.groups:
            group.written()
            if group.keep_whole and group.has_masters:
                group.publish()
                group.finish_gather()
            elif group.keep_whole:
                own = self.communicator.segment(group.whole)
                if own.data_ptr() != group.shard.data_ptr():
                    group.shard.copy_(own)
            elif group.gathered:
                group.free()

    @torch.no_grad()
    def dissolve(self) -> None:
        """Makes every parameter whole and its own again."""
        self.finish_step()
        for group in self.groups:
            group.dissolve()
        self.reducer.remove()
        for hooks in (self.gathering, self.arrivals):
            for handle in hooks.handles if hooks else ():
                handle.remove()

    def bytes_held(self) -> dict[str, int]:
        """Returns the bytes of parameters, gradients and master weights that this rank holds now."""
        parameters = sum(_bytes(group.whole) for group in self.groups)
        apart = [group for group in self.groups if not group.shares_memory]
        parameters += sum(_bytes(group.shard) for group in apart if not group.has_masters)
        masters = sum(_bytes(group.shard) for group in apart if group.has_masters)
        parameters += sum(group.copied for group in self.groups)
        gradients = sum(_bytes(group.gradient) for group in self.groups if group.gradient is not None)
        gradients += sum(_bytes(p.grad) for group in self.groups for p in group.parameters if p.grad is not None)
        return {"parameters": parameters, "gradients": gradients, "masters": masters}


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an optimizer's step computes its gradients itself: then they, and what is stepped, are given in it."""
    return any(callable(value) for value in (*args[1:], *kwargs.values()))


def thawed_message(names: list[str]) -> str:
    """Returns what to say of parameters that have been unfrozen in the middle of a run."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"ZeRO divides what trains when the run starts, but {shown} trains since; let it train from the start, in a"
        " parameter group with lr 0, or start a second run from this one's checkpoint"
    )


def _bytes(tensor: Tensor) -> int:
    return min(tensor.untyped_storage().nbytes(), tensor.nbytes)


def _stepped(share: Share) -> list[Tensor]:
    return list(share.stand_ins.values()) or [share.witness]


def _put_in_place(optimizers: list[Optimizer], initialise: Initialiser) -> None:
    """Gives optimizers, which were built on the meta device, the parameters that have values."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [initialise.now(parameter) for parameter in group["params"]]


def _take_global_norm(optimizer: Optimizer, engine: ZeroEngine, share: Share) -> None:
    """Lets an optimizer that clips by the norm of all gradients see the norm over all ranks.

    timm (1.0) computes it in ``Lamb._get_clip_grad_norm``, from the gradients it holds, and takes it nowhere else.

    Raises:
        DloError: if it is another optimizer, of whose state nothing is known.
    """
    if not hasattr(optimizer, "_get_clip_grad_norm"):
        raise DloError(
            f"ZeRO cannot partition {type(optimizer).__name__}: its update of a tensor depends on other tensors;"
            " use strategy ddp or fsdp with it"
        )

    def clip_by_global_norm() -> Tensor | None:
        most = optimizer.defaults["max_grad_norm"]
        if most is None:
            return None
        local = [tensor.grad for tensor in share.stand_ins.values() if tensor.grad is not None]
        norms = torch.stack(torch._foreach_norm(local)) if local else torch.zeros(1)
        squared = engine.communicator.sum(norms.square().sum().to(engine.device))
        return (squared.sqrt() / most).clamp_(min=1.0).to(share.groups[0].home)

    vars(optimizer)["_get_clip_grad_norm"] = clip_by_global_norm
