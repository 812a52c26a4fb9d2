"""State of a module that FSDP2 has sharded, for checkpoints, weight averages and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.checkpoint import Shard
from dlo_framework.checkpoint.shards import with_cut
from dlo_framework.distributed.canonical import readable
from dlo_framework.distributed.held import local, memory_of, optimizer_bytes
from dlo_framework.distributed.strategy import ShardedStrategy
from dlo_plugins.fsdp.optimizers import OptimizerShares
from dlo_plugins.fsdp.sharding import Sharding, local_shard
from dlo_plugins.fsdp.usage import Usage


class ShardedState(ShardedStrategy):
    """Part of MeshStrategy that describes this rank's tensors.

    Attributes:
        sharding: Sharding of the module; None before a run begins.
    """

    def __init__(self, timeout_minutes: float) -> None:
        super().__init__(timeout_minutes=timeout_minutes)
        self.sharding: Sharding | None = None
        self._usage: Usage | None = None
        self._shares: OptimizerShares | None = None
        self._open = False  # whether gradients are being accumulated
        self._complete = False  # whether partial gradients have been summed since the last backward

    def _free_gathered(self) -> None:
        """Frees the gathered parameters."""
        if self.sharding is not None:
            self.sharding.reshard()

    def gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """Returns the 2-norm over all ranks of an optimizer's gradients, each element counted once."""
        assert self._shares is not None
        return self._shares.gradient_norm(_plain(optimizer))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the module's state by name, with this rank's shards of the parameters."""
        self._free_gathered()
        state = super().lightning_module_state_dict()
        if self.sharding is None:
            return state
        cuts, elsewhere = self.sharding.layout.cuts, self.sharding.layout.elsewhere
        return {name: with_cut(value, cuts.get(name)) for name, value in state.items() if name not in elsewhere}

    def share_buffers(self) -> None:
        """Broadcasts buffers from the first data-parallel rank to the others."""
        if self.sharding is not None:  # Otherwise no run has begun, and a checkpoint saves the plain module.
            self.sharding.share_buffers()

    def held_tensors(self) -> list[Tensor]:
        """Returns the memory of this rank's parameters and buffers."""
        self._free_gathered()
        held = [*self._module().parameters(), *self._module().buffers()]
        return [local(tensor) for tensor in held if not tensor.is_meta]

    zero_stage = 3

    def whole_size(self, name: str, parameter: Tensor) -> int:
        """Returns the number of elements of the full tensor of a parameter that tensor parallelism may have cut."""
        cut = self.sharding.layout.cuts.get(name) if self.sharding is not None else None
        return parameter.numel() if cut is None else cut.whole_shape(parameter.shape).numel()

    def state_bytes(self) -> dict[str, float]:
        """Returns the bytes of the parameters, gradients and optimizer state that this rank holds now."""
        assert self.sharding is not None
        parameters = list(self.sharding.parameters.values())
        gathered = list(self._usage.gathered.values()) if self._usage is not None else []
        stepped = [tensor for optimizer in self.optimizers for tensor in self.optimizer_tensors(optimizer).values()]
        gradients = [tensor.grad for tensor in [*parameters, *gathered, *stepped] if tensor.grad is not None]
        return {
            "parameters": memory_of([*parameters, *gathered, *stepped]),
            "gradients": memory_of(gradients),
            "optimizer": optimizer_bytes(self.optimizers),
        }

    @torch.no_grad()
    def accumulated_gradients(self) -> dict[str, Shard]:
        """Returns this rank's shards of the gradients of an unfinished accumulation, averaged over the ranks."""
        assert self.sharding is not None
        assert self._usage is not None
        parameters, gathered = self.sharding.parameters, self._usage.gathered
        wholes = {name: whole.grad for name, whole in gathered.items() if whole is not parameters.get(name)}
        # Ranks may have used different parameters, but must call the same reductions.
        unreduced = self.sharding.any_rank([wholes.get(name) is not None for name in parameters])
        reduced = self.sharding.any_rank([parameter.grad is not None for parameter in parameters.values()])
        found: dict[str, Shard] = {}
        for (name, parameter), adds, has in zip(parameters.items(), unreduced, reduced, strict=True):
            if not adds and not has:
                continue
            part = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
            if adds:
                whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.sharding.device)
                gradient = wholes.get(name)
                if gradient is not None:
                    whole.copy_(gradient)
                mine = local_shard(self.reduce(whole, reduce_op="mean"), parameter)
                local(part).add_(mine.to(local(part).device))  # With offload, the shard is in CPU memory.
            elif parameter.ndim == 0:
                part = self.reduce(part, reduce_op="mean")
            found[name] = with_cut(part, self.sharding.layout.cuts.get(name))
        return found

    def restore_gradients(self, saved: Mapping[str, Any]) -> None:
        """Restores an unfinished accumulation, to which the next micro-batches add their gradients.

        Saved gradients are complete sums. Partial and tied gradients are summed again at the accumulation's end, so
        only one of their ranks restores the saved value, and the others begin with zeros.
        """
        assert self.sharding is not None
        assert self._usage is not None
        gradients = readable(saved)
        for name, parameter in self.sharding.parameters.items():
            if name in gradients:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                if self._restores_sum(name):
                    gradients.read_into(name, with_cut(parameter.grad, self.sharding.layout.cuts.get(name)))
                self._usage.used.add(name)
        self._open, self._complete = True, False

    def _restores_sum(self, name: str) -> bool:
        """Returns whether this rank, of those that sum a gradient, restores the saved sum."""
        assert self.sharding is not None
        layout = self.sharding.layout
        return name not in layout.repeated and not (name in layout.partial and self.sharding.groups.place.tp)

    def refresh(self) -> None:
        """Frees the gathered parameters, after the shards were written from outside."""
        self._free_gathered()

    def optimizer_tensors(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the tensors that an optimizer steps on this rank, by parameter name."""
        assert self._shares is not None
        return self._shares.tensors(optimizer)

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Returns the parameter names of each parameter group, those of other ranks' shards too."""
        assert self._shares is not None
        return self._shares.group_names(optimizer)

    def canonical(self, name: str, tensor: Tensor, value: Tensor) -> Shard:
        """Returns a state tensor as a shard of the tensor in the parameter's shape."""
        assert self._shares is not None
        return self._shares.as_shard(name, value)

    def room(self, name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Shard:
        """Returns an uninitialised shard of a state tensor for this rank."""
        assert self._shares is not None
        found = self._shares.empty_shard(name, shape, dtype)
        return super().room(name, tensor, shape, dtype) if found is None else found

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns a decision that all ranks agree on."""
        vote = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(vote)
        return bool(vote == self.world_size) if all else bool(vote)


def _plain(optimizer: Any) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
