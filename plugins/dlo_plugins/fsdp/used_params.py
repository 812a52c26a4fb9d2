"""Records which parameters of a sharded module get gradients in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlo_framework.distributed.gradient_check import check_backward_seen
from dlo_plugins.fsdp.sharding import ShardedModule


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
        for part in _innermost_first(sharded):
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


def _innermost_first(sharded: ShardedModule) -> list[nn.Module]:
    parts = [sharded.module.get_submodule(name) for name in sharded.units]
    return [*parts, *(root for root in sharded.roots if not any(root is part for part in parts))]
