"""Frozen model that is partitioned over all ranks, as in stage 3 of ZeRO: each rank holds 1/N of its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dlo_framework.local_memory import memory_of
from dlo_framework.placed_model import Context, PlacedModel
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.zero.unit_gathering import UnitGatherer
from dlo_plugins.zero.zero_engine import ZeroEngine


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
