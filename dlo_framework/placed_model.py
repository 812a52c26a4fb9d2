"""Frozen model of a run, as its strategy has placed it: on each rank in full, or sharded by a subclass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dlo_framework.offloaded_blocks import OffloadedBlocks, tensors_of
from dlo_framework.plan import NoBlocksError, ParallelPlan
from dlo_framework.shards import FlatShard, SlicedShard

#: Function that returns a context, such as the precision of a forward.
Context = Callable[[], contextlib.AbstractContextManager[Any]]


class PlacedModel:
    """Frozen task that a strategy has placed; each rank holds the full model, on its device or in CPU memory.

    A strategy that shards the model returns a subclass. All methods are called on all ranks, in the same order.

    Args:
        task: Task whose parameters have values; it is not the run's module, and has no trainer.
        device: Device on which this rank computes.
        context: Context of a forward, such as autocast.
        offload: Whether parameters are in CPU memory, and each block's are copied to the device for its forward.
        moved: Whether a subclass has placed the tensors.
    """

    def __init__(
        self,
        task: Any,
        device: torch.device,
        *,
        context: Context = contextlib.nullcontext,
        offload: bool = False,
        moved: bool = False,
    ) -> None:
        self.task, self.device, self._context = task, device, context
        self._offloaded: OffloadedBlocks | None = None
        if offload and not moved:
            blocks = [task.get_submodule(name) for name in block_names(task)]
            self._offloaded = OffloadedBlocks(task, blocks, device)
        elif not moved:
            task.to(device)

    # --- forward -------------------------------------------------------------------------------------------

    @property
    def has_outputs(self) -> bool:
        """Whether this rank gets the outputs; under a pipeline only the last stage's ranks do."""
        return True

    def outputs(self, batch: Any) -> Any:
        """Returns the task's outputs for a batch on the device, without a graph; None where :attr:`has_outputs` is not.

        Args:
            batch: Batch as the strategy's steps get it; a strategy that shards sequences shards it here.
        """
        return self.run(self._forward, batch)

    @torch.no_grad()
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that runs the model any number of times, equally often on all ranks; returns its result.

        The model computes in the precision of the placement, without a graph.
        """
        with self._context(), self.gathered():
            return self._call(function, *args)

    def own_part(self, batch: Any) -> Any:
        """Returns the part of a batch to which this rank's outputs belong: its shard where ranks share sequences.

        Args:
            batch: Batch as the strategy's steps get it.
        """
        return batch

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        with contextlib.nullcontext() if self._offloaded is None else self._offloaded.prefetching():
            return function(*args)

    def _forward(self, batch: Any) -> Any:
        args, kwargs = self.task.inputs(batch)
        return self.task.forward(*args, **kwargs)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Makes the parameters outside of blocks, such as the head's, full tensors on the device inside the block."""
        with contextlib.nullcontext() if self._offloaded is None else self._offloaded.root_on_device():
            yield

    @property
    def head(self) -> Any:
        """Head of the task, whose weights can be used inside :meth:`gathered`."""
        return self.task.head

    # --- state ---------------------------------------------------------------------------------------------

    def shards(self) -> dict[str, Any]:
        """Returns this rank's tensors and shards of the task's state, by name."""
        return {name.replace("_orig_mod.", ""): value for name, value in self.task.state_dict().items()}

    @torch.no_grad()
    def load(self, saved: Any) -> None:
        """Reads this rank's shards of the weights.

        Args:
            saved: Weights of a checkpoint, a :class:`~dlo_framework.checkpoint.LazyStateDict` with all names.
        """
        for name, shard in self.shards().items():
            if isinstance(shard, Tensor | FlatShard | SlicedShard):
                saved.read_into(name, shard)
            else:  # torch's get_extra_state, under the name of its module and this suffix
                self.task.get_submodule(name.rpartition(".")[0]).set_extra_state(saved[name])
        self.refresh()

    def refresh(self) -> None:
        """Called after the shards have been written to."""

    def held_bytes(self) -> int:
        """Returns the bytes of the model's tensors in this rank's memory."""
        storages = [tensor.untyped_storage() for tensor in tensors_of(self.task)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def close(self) -> None:
        """Frees the model."""
        if self._offloaded is not None:
            self._offloaded.remove()
        self.task = None


def block_names(task: Any) -> list[str]:
    """Returns the names of a task's blocks, from its plan; none if it has none."""
    try:
        plan: ParallelPlan = task.parallel_plan()
        return [f"model.{name}" for name in plan.block_names(task.model)]
    except NoBlocksError:
        return []
