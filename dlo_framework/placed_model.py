"""Frozen model of a run, as its strategy has placed it: in full, in CPU memory, or sharded by a subclass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dlo_framework.copy_streams import CopyHandle, copy_streams, empty_host_tensor
from dlo_framework.local_memory import memory_of
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
        return memory_of(tensors_of(self.task))

    def close(self) -> None:
        """Frees the model."""
        if self._offloaded is not None:
            self._offloaded.remove()
        self.task = None


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Puts a module into evaluation mode inside the block, and then each of its modules into its own."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def block_names(task: Any) -> list[str]:
    """Returns the names of a task's blocks, from its plan; none if it has none."""
    try:
        plan: ParallelPlan = task.parallel_plan()
        return [f"model.{name}" for name in plan.block_names(task.model)]
    except NoBlocksError:
        return []


#: Bytes to whose multiples the tensors of one copy are aligned, as CUDA's allocator aligns them.
_ALIGNMENT = 512


class OffloadedBlocks:
    """Keeps a module's tensors in page-locked CPU memory, and copies them to the device for a forward.

    A block's tensors are on the device from the start of the block before to the end of its own forward, so that the
    copies, on a stream of their own, run beside the computation. The device has at most two blocks and the tensors
    outside of blocks. These are there inside :meth:`root_on_device`. The module must not train: copies are not written
    back. On a CPU nothing is copied.

    Args:
        module: Module whose forward runs on the device.
        blocks: Blocks of the module, in the order of their forwards. Tensors that several of them share are outside of
            blocks.
        device: Device on which this rank computes.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._handles: list[RemovableHandle] = []
        module.to("cpu")
        owners: dict[int, int] = {}
        for block in blocks:
            for tensor in tensors_of(block):
                owners[id(tensor)] = owners.get(id(tensor), 0) + 1
        if device == torch.device("cpu"):
            self._blocks, self._root = list[_OffloadedTensors](), _OffloadedTensors([], device)
            return
        self._blocks = [
            _OffloadedTensors([tensor for tensor in tensors_of(block) if owners[id(tensor)] == 1], device)
            for block in blocks
        ]
        outside = [tensor for tensor in tensors_of(module) if owners.get(id(tensor)) != 1]
        self._root = _OffloadedTensors(outside, device)
        for number, block in enumerate(blocks):
            self._handles.append(block.register_forward_pre_hook(lambda *_, n=number: self._begin_block(n)))
            self._handles.append(
                block.register_forward_hook(lambda *_, n=number: self._blocks[n].drop(), always_call=True)
            )

    @contextlib.contextmanager
    def root_on_device(self) -> Iterator[None]:
        """Holds the tensors outside of blocks on the device inside the context."""
        self._root.load()
        try:
            yield
        finally:
            self._root.drop()

    @contextlib.contextmanager
    def prefetching(self) -> Iterator[None]:
        """Context of a forward: starts the copy of the first block, and frees copies that no block has used."""
        self._prefetch(0)
        try:
            yield
        finally:
            for block in self._blocks:
                block.discard()

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin_block(self, number: int) -> None:
        self._blocks[number].load()
        self._prefetch(number + 1)

    def _prefetch(self, number: int) -> None:
        if number < len(self._blocks):
            self._blocks[number].start()


class _OffloadedTensors:
    """Tensors that are in one CPU buffer, and sometimes in one on a device; nested uses share a copy.

    Args:
        tensors: Tensors, whose data become views of the buffer.
        device: Device to copy to.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._depth = 0
        self._arriving: CopyHandle | None = None
        self._there: Tensor | None = None  # bytes on the device
        ends = [0]
        for tensor in tensors:
            ends.append(ends[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        self._offsets = ends[:-1]
        self._here = empty_host_tensor(torch.empty(ends[-1], dtype=torch.uint8, device="meta"), device)
        self._host_views = self._views(self._here)
        for tensor, view in zip(tensors, self._host_views, strict=True):
            view.copy_(tensor.data)
            tensor.data = view

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """Returns views of a buffer in the tensors' shapes, strides and dtypes; strides with gaps become dense ones."""
        views = []
        for tensor, offset in zip(self._tensors, self._offsets, strict=True):
            like = torch.empty_like(tensor, device="meta")
            typed = buffer[offset : offset + tensor.nbytes].view(tensor.dtype)
            views.append(typed.as_strided(like.size(), like.stride()))
        return views

    def start(self) -> None:
        """Starts the copy to the device, unless it has been started."""
        if self._there is None and self._tensors:
            self._there = torch.empty_like(self._here, device=self._device)
            # The buffer is freed only after the copy has been waited for: its stream need not be recorded.
            self._arriving = copy_streams(self._device).up.copy(self._there, self._here, records=False)

    def load(self) -> None:
        """Has the tensors on the device: its computation waits for the copy, the host does not."""
        self._depth += 1
        if self._depth > 1 or not self._tensors:
            return
        self.start()
        self._wait()
        assert self._there is not None
        self._point_to(self._views(self._there))

    def drop(self) -> None:
        """Frees the copy, at the end of the outermost use."""
        self._depth -= 1
        self.discard()

    def discard(self) -> None:
        """Frees a copy that is not in use."""
        if self._depth == 0 and self._there is not None:
            self._wait()
            self._point_to(self._host_views)
            self._there = None

    def _wait(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def _point_to(self, views: Sequence[Tensor]) -> None:
        for tensor, view in zip(self._tensors, views, strict=True):
            tensor.data = view


def tensors_of(module: nn.Module) -> list[Any]:
    """Returns the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]
