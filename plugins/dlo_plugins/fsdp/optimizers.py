"""The optimizers of a sharded module: what each of them steps, and how gradients come to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.checkpoint import CutShard, FlatShard, Shard
from dlo_framework.checkpoint.shards import with_cut
from dlo_framework.distributed.canonical import clean
from dlo_framework.distributed.fused import prefer_fused
from dlo_framework.distributed.held import local
from dlo_framework.distributed.norms import parts
from dlo_framework.errors import DloError
from dlo_plugins.fsdp.pieces import RowShare, WholeShare, groups_of
from dlo_plugins.fsdp.sharding import Sharding
from dlo_plugins.zero.probe import kind_of
from dlo_plugins.zero.shares import Share


class OptimizerShares:
    """This rank's share of each optimizer's parameters, put into the optimizer in their place.

    An optimizer that needs to see the gradients of all parameters at once keeps the DTensors, for which torch
    communicates in each of its operations; so do parameters that are added to an optimizer later.

    Args:
        optimizers: as configured on the sharded module.
        sharding: of the module.
    """

    def __init__(self, optimizers: list[Optimizer], sharding: Sharding) -> None:
        self.sharding, self.communicator = sharding, sharding.sharers
        self.optimizers = optimizers
        self._names = {id(parameter): clean(name) for name, parameter in sharding.module.named_parameters()}
        dtypes = {parameter.dtype.to_real() for parameter in sharding.parameters.values()}
        self._wide = torch.float64 if torch.float64 in dtypes else torch.float32  # what norms are summed in
        self._shares = {id(optimizer): self._share(optimizer) for optimizer in optimizers}

    def _share(self, optimizer: Optimizer) -> Share | None:
        kind = kind_of(optimizer)
        if kind == "all" and not hasattr(optimizer, "_get_clip_grad_norm"):
            if self.sharding.options.offload and self.sharding.device.type != "cpu":
                raise DloError(
                    f"{type(optimizer).__name__} needs all gradients at once, which lie in the ranks' CPU memory; leave"
                    " offload out"
                )
            return None
        if kind != "elementwise" and self.sharding.layout.cuts:
            raise DloError(
                f"{type(optimizer).__name__} needs whole tensors, of which tensor parallelism leaves each rank a part;"
                " use an elementwise optimizer such as AdamW, or tp: 1 with more dp_shard"
            )
        groups = groups_of(optimizer, self._held_names(), self.communicator, self.sharding.device)
        share = (RowShare if kind == "elementwise" else WholeShare)(groups, self.communicator)
        if kind == "all":
            self._take_global_norm(optimizer)
        share.move_into(optimizer, self._names)
        prefer_fused(optimizer, on_cpu=self.sharding.options.offload and self.sharding.device.type != "cpu")
        optimizer.register_step_post_hook(lambda *_: share.publish())
        return share

    def _held_names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.sharding.parameters.items()}

    def _take_global_norm(self, optimizer: Any) -> None:
        """Lets an optimizer that clips by the norm of all gradients see the norm over all ranks.

        timm (1.0) computes it in ``Lamb._get_clip_grad_norm``, from the gradients it holds, and takes it nowhere else.
        """

        def clip_by_global_norm() -> Tensor | None:
            most = optimizer.defaults["max_grad_norm"]
            if most is None:
                return None
            home = next((tensor.device for tensor in _stepped(optimizer)), self.sharding.device)
            return (self.gradient_norm(optimizer) / most).clamp_(min=1.0).to(home)

        optimizer._get_clip_grad_norm = clip_by_global_norm

    # --- gradients -----------------------------------------------------------------------------------------

    def drop_gradients(self, wanted: Callable[[Share], bool]) -> set[str]:
        """Forgets the parameters' gradients, of the shares that ``wanted`` picks; returns their names."""
        dropped: set[str] = set()
        for share in self._shares.values():
            if share is not None and wanted(share):
                for parameter in _parameters(share):
                    parameter.grad = None
                dropped.update(name for group in share.groups for name in group.names)
        return dropped

    @staticmethod
    def wiped(share: Share) -> bool:
        """Whether ``zero_grad`` or a step has dropped the gradients that were given."""
        return all(tensor.grad is None for tensor in _stand_ins(share))

    @torch.no_grad()
    def give(self, used: Iterable[str]) -> None:
        """Gives the optimizers' tensors the gradients that backward has left on the parameters."""
        used = set(used)
        for share in self._shares.values():
            if share is None:
                continue
            if not any(tensor.requires_grad for tensor in _stand_ins(share)):
                for parameter in _parameters(share):  # Another optimizer has been toggled.
                    parameter.grad = None
                continue
            share.give_gradients(used)
            for tensor in _stand_ins(share):
                if tensor.numel() == 0 and tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)  # So that a loss scale's check finds something to check.

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm over all ranks of an optimizer's gradients, each element counted once."""
        gradients = [
            part
            for name, tensor in self.tensors(optimizer).items()
            if tensor.grad is not None and self._counts(name, tensor)
            for part in parts(local(tensor.grad))
        ]
        squared = torch.zeros((), device=self.sharding.device, dtype=self._wide)
        if gradients:
            norms = torch._foreach_norm(gradients)
            squared += torch.stack([norm.to(squared) for norm in norms]).square().sum()
        return self.sharding.copy.sum(squared).sqrt()

    def _counts(self, name: str, tensor: Tensor) -> bool:
        """Whether the norm counts what this rank has of a gradient, and no other rank has the same."""
        layout, place = self.sharding.layout, self.sharding.groups.place
        if name in layout.repeated or (place.tp and name not in layout.cuts):
            return False
        # What has no dims and no stand-in is whole on every rank.
        return not (id(tensor) in self._names and tensor.ndim == 0 and self.communicator.rank)

    # --- state ---------------------------------------------------------------------------------------------

    def tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns what an optimizer steps on this rank, by parameter name."""
        share = self._shares[id(optimizer)]
        found = dict(share.stand_ins) if share is not None else {}
        for tensor in _stepped(optimizer):
            if id(tensor) in self._names:
                found[self._names[id(tensor)]] = tensor
        return found

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the names of each parameter group's parameters, those of other ranks' shares too."""
        share = self._shares[id(optimizer)]
        known = share.group_names if share is not None else []
        added = optimizer.param_groups[len(known) :]
        return known + [[self._names[id(parameter)] for parameter in group["params"]] for group in added]

    def share_of(self, name: str) -> Share | None:
        """Returns the share that a parameter is in; None for one that an optimizer steps as a DTensor."""
        return next((share for share in self._shares.values() if share is not None and name in share.shapes), None)

    def canonical(self, name: str, value: Tensor) -> Shard:
        """Returns a state tensor as the part of the parameter-shaped one that it is."""
        share = self.share_of(name)
        found = value if share is None else share.canonical(name, value)
        # Of an elementwise optimizer's state, what is a flat shard has the parameter's shape; a step count has not.
        if share is not None and not isinstance(found, FlatShard):
            return found
        return with_cut(found, self.sharding.layout.cuts.get(name))

    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Shard | None:
        """Returns room for this rank's part of a state tensor; None for a parameter that is stepped as it is."""
        share, cut = self.share_of(name), self.sharding.layout.cuts.get(name)
        if share is None:
            return None
        if cut is None or len(shape) <= cut.dim or shape[cut.dim] != cut.size:
            return share.room(name, shape, dtype)
        found = share.room(name, cut.part_shape(shape), dtype)
        return CutShard(found, cut) if isinstance(found, FlatShard) else share.room(name, shape, dtype)


def _stand_ins(share: Share) -> list[Tensor]:
    return list(share.stand_ins.values()) or [share.witness]


def _parameters(share: Share) -> list[nn.Parameter]:
    return [parameter for group in share.groups for parameter in group.parameters]


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
