"""Frozen model on a mesh: sharded by FSDP2, cut by tensor, context and pipeline parallelism, by a plan of its own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from dlo_framework.local_memory import memory_of
from dlo_framework.placed_model import Context, PlacedModel
from dlo_framework.strategy_contract import plain_name
from dlo_plugins.appliers.applier_order import MeshAppliers
from dlo_plugins.mesh.parallelize import MeshOptions, ParallelState
from dlo_plugins.pipeline.pipeline_schedules import flushes


def frozen_options(options: MeshOptions, *, dtype: torch.dtype | None = None, offload: bool = False) -> MeshOptions:
    """Returns the options by which a mesh places a frozen model.

    They are those of the run's model, without what belongs to that model alone: the names of its units, the split of
    its blocks, recomputation, a delay of gradients, and the user's own appliers. Experts are sharded as other
    parameters are, without `ep`.

    Args:
        options: Options of the run.
        dtype: Dtype of the frozen model's parameters; None for the Trainer's precision.
        offload: Whether shards are in CPU memory; they are too where those of the run's model are.
    """
    shard = copy.copy(options.appliers.shard)
    shard.units, shard.recompute, shard.offload = None, False, shard.offload or offload
    if dtype is not None:
        shard.dtypes = (None, None, None)
    # A schedule that flushes has one version of the weights, which ranks may shard; the stages are the same.
    pipelining = options.pipelining
    if options.spec.pp > 1 and not flushes(pipelining.schedule):
        pipelining = replace(pipelining, schedule="1F1B")
    tensor, context = options.appliers.tensor, options.appliers.context
    appliers = MeshAppliers.from_options([shard], context.method, tensor.sequence_parallel, tensor.async_tp)
    return replace(
        options,
        spec=replace(options.spec, ep=1),
        appliers=appliers,
        pipelining=replace(pipelining, split=None),
        precision=options.precision if dtype is None else "32-true",
    )


class FrozenMesh(PlacedModel):
    """Frozen task that a mesh has parallelized.

    Args:
        task: Task whose model has been cut and sharded.
        device: Device on which this rank computes.
        state: Result of the parallelization.
        context: Context of a forward, such as autocast.
    """

    def __init__(
        self, task: Any, device: torch.device, state: ParallelState, *, context: Context = contextlib.nullcontext
    ) -> None:
        self._state, self.sharded = state, state.sharded
        super().__init__(task, device, context=context, moved=True)

    @property
    def has_outputs(self) -> bool:
        """Whether this rank has the last stage of a pipeline; True without one."""
        pipelined = self._state.pipelined
        return pipelined is None or pipelined.pipeline.is_last

    def own_part(self, batch: Any) -> Any:
        """Returns this rank's shard of the batch's sequences, or the batch where ranks do not share them."""
        context = self._state.context
        return batch if context is None or context.sequence is None else context.shard_batch(batch)

    def _forward(self, batch: Any) -> Any:
        batch, pipelined = self.own_part(batch), self._state.pipelined
        return super()._forward(batch) if pipelined is None else pipelined.outputs(batch)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return self.sharded.call(function, *args)
        finally:
            self.sharded.reshard()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers the parameters outside of units inside the block."""
        roots = [root for root in self.sharded.roots if isinstance(root, FSDPModule)]
        for root in roots:
            root.unshard()
        try:
            yield
        finally:
            for root in roots:
                root.reshard()

    def shards(self) -> dict[str, Any]:
        """Returns this rank's shards of the task's state by name, without tensors of other stages."""
        return self.sharded.shards({plain_name(name): value for name, value in self.task.state_dict().items()})

    def refresh(self) -> None:
        """Makes the next forward see the shards' values, after they have been written to."""
        self.sharded.refresh()

    def held_bytes(self) -> int:
        """Returns the bytes of this rank's shards and of its buffers."""
        buffers = (buffer for buffer in self.task.buffers() if not buffer.is_meta)
        return memory_of([*self.sharded.parameters.values(), *buffers])
