"""Measures a block on its own inputs: bytes and seconds of its forward and backward, in each mode.

A block runs on detached inputs, forward and backward, without an effect on the step: gradients are returned and
dropped, and random state and buffers are restored. The gradients of parameters are not counted, as a step keeps them in
any mode.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from dlo_framework.recompute import BufferGuard, checkpointed
from dlo_plugins.remat.allocation_log import AllocationLog, storage_bytes, tensor_storage
from dlo_plugins.remat.selective_policy import contexts_for

#: Modes of a block that stays in a schedule: the names of :class:`~dlo_plugins.remat.chain.Mode`.
MODES = ("all", "selective")
_REPEATS = 3
#: Share of a block's kept bytes that hooks must see: the rest are small, such as the state of random numbers.
_MOVABLE_SHARE = 0.99


@dataclass(frozen=True)
class ModeBytes:
    """Bytes of a block in one mode, and whether they can be copied; see :class:`~dlo_plugins.remat.chain.Mode`."""

    saved: int
    forward_peak: int
    backward_peak: int
    movable: bool = False


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block.

    Attributes:
        input: Bytes of its input, the hidden state.
        output: Bytes of its output.
        forward_peak: Transient bytes of a forward that keeps nothing, above input and output.
        modes: Bytes of each mode.
    """

    input: int
    output: int
    forward_peak: int
    modes: tuple[ModeBytes, ...]


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of a block's forward and backward, in each mode."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


class BlockRun:
    """Runs of a block on detached copies of a call's arguments.

    Args:
        block: Block, with its parameters gathered.
        forward: Forward of the block.
        args: Arguments of the call.
        kwargs: Arguments by name.
        clock: Function that returns modelled seconds; by default time is measured.
    """

    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock, self._block, self._forward, self._given = clock, block, forward, (args, kwargs)
        self._guard = BufferGuard(block)
        self._trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
        tensors = [leaf for leaf in tree_leaves(self._given) if isinstance(leaf, Tensor)]
        self.hidden = storage_bytes(tensors[:1])
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def forward(self, mode: str) -> tuple[list[Tensor], list[Tensor]]:
        """Runs forward; returns the inputs and the outputs that have gradients."""
        args, kwargs = tree_map(_detached, self._given)
        torch.clear_autocast_cache()
        if mode == "all":
            outputs = self._forward(*args, **kwargs)
        else:
            context_fn = contexts_for(self._block)
            outputs = checkpointed(self._forward, *args, guard=self._guard, context_fn=context_fn, **kwargs)
        torch.clear_autocast_cache()
        return _differentiable((args, kwargs)), _differentiable(outputs)

    def backward(self, inputs: Sequence[Tensor], outputs: list[Tensor], gradients: list[Tensor]) -> tuple[Any, ...]:
        """Runs backward; returns the gradients of the inputs and the parameters, None for unused ones."""
        sources = [*inputs, *self._trained]
        return torch.autograd.grad(outputs, sources, gradients, allow_unused=True) if outputs and sources else ()

    def count_bytes(self, log: AllocationLog) -> BlockBytes:
        """Returns the bytes of the block.

        Args:
            log: Log, which is on.
        """
        with self._isolated():
            start = log.mark()
            args, kwargs = tree_map(_detached, self._given)
            # With gradients, as in a region: some operators in place copy their input then.
            torch.clear_autocast_cache()
            outputs = checkpointed(self._forward, *args, **kwargs)
            torch.clear_autocast_cache()
            output = storage_bytes(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
            plain = log.usage(start)
            del outputs, args, kwargs
            modes = tuple(self._count_mode(log, mode, output) for mode in self.possible_modes())
        return BlockBytes(self.hidden, output, max(0, plain.peak - output), modes)

    def _count_mode(self, log: AllocationLog, mode: str, output: int) -> ModeBytes:
        start, packed = log.mark(), _PackedBytes()
        with saved_tensors_hooks(packed.pack, _same) if mode == MODES[0] else contextlib.nullcontext():
            inputs, outputs = self.forward(mode)
        kept = log.usage(start)
        saved = max(kept.final, output)
        # Selective checkpoints keep tensors that no hook sees, and so do functions in attributes of their contexts.
        movable = mode == MODES[0] and packed.count(log, start, outputs) >= _MOVABLE_SHARE * (saved - output)
        gradients = [torch.zeros_like(tensor) for tensor in outputs]
        found = self.backward(inputs, outputs, gradients)
        own = log.numbers(gradient for gradient in found[len(inputs) :] if gradient is not None)
        peak = log.usage(start, without=own).peak
        del found, gradients, inputs, outputs
        return ModeBytes(saved, max(0, kept.peak - saved), max(0, peak - saved - output - self.hidden), movable)

    def possible_modes(self) -> tuple[str, ...]:
        """Returns the modes in which the block can run: a block that writes into a kept output has only the first."""
        inputs, outputs = self.forward(MODES[1])
        try:
            self.backward(inputs, outputs, [torch.zeros_like(tensor) for tensor in outputs])
        except RuntimeError as error:
            if "has been mutated" not in str(error):  # the message of torch 2.11 to 2.15
                raise
            return MODES[:1]
        return MODES

    def measure_seconds(self, modes: int) -> BlockTimes:
        """Returns the shortest times of a few runs, which other programs disturb least.

        Args:
            modes: Number of the modes in which the block can run.
        """
        with self._isolated():
            if self._clock is None:
                self._seconds(MODES[0])  # The first run allocates, and chooses kernels.
            repeats = _REPEATS if self._clock is None else 1
            found = [[self._seconds(mode) for _ in range(repeats)] for mode in MODES[:modes]]
        shortest = [tuple(min(run[part] for run in runs) for runs in found) for part in (0, 1)]
        return BlockTimes(*shortest)

    def _seconds(self, mode: str) -> tuple[float, float]:
        begin = self._now()
        inputs, outputs = self.forward(mode)
        middle = self._now()
        gradients = [torch.zeros_like(tensor) for tensor in outputs]
        ready = self._now()
        self.backward(inputs, outputs, gradients)
        return middle - begin, self._now() - ready

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() if self._clock is None else self._clock()

    @contextlib.contextmanager
    def _isolated(self) -> Iterator[None]:
        """Restores random state and buffers at the block's end."""
        owners = [(owner, dict(owner._buffers)) for owner in self._block.modules() if owner._buffers]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            for owner, buffers in owners:
                owner._buffers.update({name: None if b is None else b.detach().clone() for name, b in buffers.items()})
            try:
                yield
            finally:
                torch.clear_autocast_cache()
                for owner, buffers in owners:
                    owner._buffers.clear()
                    owner._buffers.update(buffers)


class _PackedBytes:
    """Bytes of the storages that autograd saves by tensors that hooks see."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.UntypedStorage]] = []

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that is saved."""
        storage = tensor_storage(tensor)
        if storage is not None:
            self._tensors.append(weakref.ref(storage))
        return tensor

    def count(self, log: AllocationLog, start: int, outputs: Iterable[Tensor]) -> int:
        """Returns the bytes of the storages that were allocated from a position in a log on, without the outputs'."""
        storages = [storage for reference in self._tensors if (storage := reference()) is not None]
        return log.allocated_bytes(storages, start, log.numbers(outputs))


def _same(value: Any) -> Any:
    return value


def _detached(value: Any) -> Any:
    """Returns a tensor apart from its graph; other arguments as they are."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _differentiable(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
