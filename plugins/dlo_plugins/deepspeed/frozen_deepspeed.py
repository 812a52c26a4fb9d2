"""Frozen model that DeepSpeed's stage 3 partitions and gathers, by an engine of its own without an optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from dlo_framework.local_memory import memory_of
from dlo_framework.placed_model import Context, PlacedModel, block_names
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.deepspeed.deepspeed_engine import DeepSpeedEngine
from dlo_plugins.deepspeed.engine_precision import ForwardInAutocast
from dlo_plugins.deepspeed.partitioned_params import is_partitioned, local_partition, segments

#: Section of DeepSpeed's configuration of a half-precision model, by its dtype.
_SECTIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def frozen_config(config: dict[str, Any], dtype: torch.dtype | None, offload: bool) -> dict[str, Any]:
    """Returns DeepSpeed's configuration of a frozen model, from that of the run.

    Args:
        config: Complete configuration of the run.
        dtype: Dtype of the frozen model's parameters; None for the run's precision.
        offload: Whether partitions are in CPU memory; they are too where those of the run's model are.
    """
    found = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
    zero = {key: value for key, value in found["zero_optimization"].items() if key != "offload_optimizer"}
    if offload:
        zero.setdefault("offload_param", {"device": "cpu"})
    if dtype is not None:
        found = {key: value for key, value in found.items() if key not in ("fp16", "bf16")}
        if dtype in _SECTIONS:
            found[_SECTIONS[dtype]] = {"enabled": True}
    return {**found, "zero_optimization": zero}


class FrozenDeepSpeed(PlacedModel):
    """Frozen task whose parameters DeepSpeed gathers module by module.

    Args:
        task: Task that the engine has partitioned.
        engine: Engine of stage 3, without an optimizer.
        context: Context of a forward; DeepSpeed switches off an autocast outside of its own forward.
        owns: Whether :meth:`close` ends the engine.
    """

    def __init__(
        self, task: Any, engine: DeepSpeedEngine, *, context: Context = contextlib.nullcontext, owns: bool = True
    ) -> None:
        self.engine, self._call_in_autocast, self._owns = engine, ForwardInAutocast(context), owns
        super().__init__(task, engine.device, moved=True)
        blocks = tuple(f"{name}." for name in block_names(task))
        self._root = [
            parameter
            for name, parameter in task.named_parameters()
            if is_partitioned(parameter) and not name.startswith(blocks or ("",))
        ]

    def outputs(self, batch: Any) -> Any:
        """Returns the task's outputs for a batch, without a graph."""
        with torch.no_grad():
            found = self._call_in_autocast(self.engine.deepspeed, self.task, "_outputs", batch)
        self.engine.gather_persistent()
        return found

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers the parameters outside of blocks inside the block."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(self._root):
            yield

    def shards(self) -> dict[str, Any]:
        """Returns this rank's segments of the parameters, and the buffers, by name."""
        cut, first_names = segments(self.task), {id(p): plain_name(name) for name, p in self.task.named_parameters()}
        state = super().shards()
        for name, value in self.task.state_dict(keep_vars=True).items():
            if first_names.get(id(value)) in cut:
                state[plain_name(name)] = cut[first_names[id(value)]]
        return state

    def refresh(self) -> None:
        """Gathers the small parameters that stage 3 keeps in full, after the segments have been written to."""
        self.engine.load_params()

    def held_bytes(self) -> int:
        """Returns the bytes of this rank's segments, of the parameters that are gathered now, and of the buffers."""
        parameters = list(self.task.parameters())
        return memory_of([*parameters, *(local_partition(p) for p in parameters), *self.task.buffers()])

    def close(self) -> None:
        """Ends the engine, and frees the model."""
        if self._owns:
            self.engine.deepspeed.destroy()
        super().close()
