"""Survey of a chain of blocks in real steps: bytes in one step, seconds in another, and whether regions are possible.

While it is on, each block recomputes its activations, so that the steps need little memory; their results are those of
any other step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.recompute import BufferGuard, checkpointed, recomputes
from dlo_plugins.remat.allocation_log import AllocationLog, tensor_storage
from dlo_plugins.remat.block_calls import intercept_calls, restore_calls
from dlo_plugins.remat.block_measurement import MODES, BlockBytes, BlockRun, BlockTimes
from dlo_plugins.remat.chain import Chain, Mode, Stage
from dlo_plugins.remat.region_check import RegionCheck

#: Modules whose hooks on blocks may run once for each execution of a block.
_KNOWN_HOOKS = ("torch.", "lightning.", "dlo_framework.", "dlo_plugins.", "deepspeed.")


class BlockSurvey:
    """Survey of the blocks of one chain.

    Args:
        blocks: Blocks, in the order in which the model calls them.
        names: Names of the blocks.
        is_last: Whether the model's head and its loss follow the blocks on this rank.
        parameters: Function that returns the parameters of the model as they are now.
        clock: Function that returns modelled seconds, for fake tensors; by default time is measured. Whether regions
            are possible is not checked on fake tensors.

    Attributes:
        log: Log of the step in which bytes are measured; None in others.
        times_blocks: Whether the seconds of blocks are measured in this step.

    Raises:
        DloError: A block recomputes already.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        names: Sequence[str],
        is_last: bool,
        parameters: Callable[[], list[Tensor]],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.blocks, self.names, self._is_last, self._parameters = list(blocks), list(names), is_last, parameters
        self._clock = clock
        self.log: AllocationLog | None = None
        self.times_blocks = False
        self._stem = 0
        self._check = RegionCheck(self.names)
        self._bytes: dict[int, BlockBytes] = {}
        self._times: dict[int, BlockTimes] = {}
        self._gathered: dict[int, int] = {}  # bytes of a block's parameters that are gathered for its forward
        self._gathering: dict[int, float] = {}  # seconds of a block's call before its forward: of its hooks
        self._called = 0.0
        self._head: tuple[int, int] | None = None  # positions in the log
        self._head_gradient: set[int] = set()  # number of the gradient of the head's input, in the log
        self._head_bytes = self._head_left = 0
        self._head_seconds = 0.0
        self._device = torch.device("cpu")
        known = next((n for n, b in zip(names, blocks, strict=True) if recomputes(b)), None)
        if known is not None:
            raise DloError(
                f"blocks must recompute by Rotor alone, got '{known}' that recomputes already; leave out"
                " ActivationCheckpoint, and recompute: true of the task and the strategy"
            )
        self._guards = [BufferGuard(block) for block in self.blocks]
        self._resident = {key for block in self.blocks for key in _storages(block.parameters())}
        self._own_forwards = [block.__dict__.get("forward") for block in self.blocks]
        for index, block in enumerate(self.blocks):
            intercept_calls(block, self._handler(index))
            block.forward = self._measured(index, block)

    def remove(self) -> None:
        """Makes the blocks run as they did before."""
        for block, forward in zip(self.blocks, self._own_forwards, strict=True):
            restore_calls(block)
            del block.__dict__["forward"]
            if forward is not None:
                block.forward = forward

    @property
    def refusal(self) -> str:
        """Why the blocks cannot run as regions; empty if they can."""
        if self._check.refusal:
            return self._check.refusal
        hooked = next((n for n, b in zip(self.names, self.blocks, strict=True) if _has_foreign_hook(b)), None)
        return "" if hooked is None else f"'{hooked}' has a hook that would run again in each recomputation"

    def _handler(self, index: int) -> Callable[..., Any]:
        def call(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                return own(*args, **kwargs)
            if self._clock is None:
                args, kwargs = self._check.enter(index, args, kwargs)
            if self.times_blocks and index not in self._times:
                self._called = self._now()
            # Compiled code is measured uncompiled: its inside cannot be seen.
            compiled = self.blocks[index].__dict__.pop("_compiled_call_impl", None)
            try:
                output = own(*args, **kwargs)
            finally:
                if compiled is not None:
                    self.blocks[index].__dict__["_compiled_call_impl"] = compiled
            if index + 1 == len(self.blocks) and self._is_last:
                self._begin_head(output)
            return self._check.leave(index, output) if self._clock is None else output

        return call

    def _measured(self, index: int, block: nn.Module) -> Callable[..., Any]:
        forward, guard = block.forward, self._guards[index]

        def measured(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            run = BlockRun(block, forward, args, kwargs, self._clock)
            self._device = run.device
            if self.log is not None and index not in self._bytes:
                if index == 0:
                    self._stem = self._kept(self.log, run.hidden)
                self._bytes[index] = run.count_bytes(self.log)
                own = _storages(block.parameters())
                self._gathered[index] = sum(size for key, size in own.items() if key not in self._resident)
            elif self.times_blocks and index in self._bytes and index not in self._times:
                self._gathering[index] = self._now() - self._called
                self._times[index] = run.measure_seconds(len(self._bytes[index].modes))
            return checkpointed(forward, *args, guard=guard, **kwargs)

        return measured

    def _kept(self, log: AllocationLog, hidden: int) -> int:
        parameters = log.numbers(self._parameters())
        return max(0, log.usage(0, without=parameters).final - hidden)

    def _begin_head(self, output: Any) -> None:
        """Begins the measurement of the head and the loss, which ends when the last block's output has its gradient."""
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        if self.log is not None and self._head is None:
            log, start = self.log, self.log.mark()

            def end(gradient: Tensor) -> None:
                if self._head is None:
                    self._head, self._head_gradient = (start, log.mark()), log.numbers([gradient])

            self._head = None
            output.register_hook(end)
        elif self.times_blocks and not self._head_seconds:
            begin = self._now()

            def stop(gradient: Tensor) -> None:
                self._head_seconds = self._head_seconds or self._now() - begin

            output.register_hook(stop)

    def begin_bytes(self, log: AllocationLog) -> None:
        """Begins the step in which bytes are measured, and calls are checked.

        Args:
            log: Log, which is on during the step.
        """
        self.log, self._check = log, RegionCheck(self.names)

    def end_bytes(self, gradients: Sequence[Tensor]) -> None:
        """Ends the step in which bytes are measured.

        Args:
            gradients: Gradients of the parameters, which are not counted.
        """
        if self.log is not None and self._head is not None:
            # Buffers for gradients of parameters do not count either, such as the buckets of a strategy.
            buffers = self.log.left_by_backward(*self._head) | self.log.numbers(gradients)
            self._head_left = self.log.usage(*self._head, without=buffers).final
            found = self.log.change(*self._head, without=buffers - self._head_gradient)
            self._head_bytes = max(0, found.peak - self._head_left)
        self.log = None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() if self._clock is None else self._clock()

    @property
    def stem(self) -> int:
        """Bytes that are kept beside the chain.

        They are what is kept before the first block, without its input; what is left of the head and the loss while the
        blocks' backward runs, such as outputs; and copies of buffers, as a region copies those that its blocks change
        before its forward and for its recomputation.
        """
        return self._stem + self._head_left + 2 * sum(guard.copied_bytes for guard in self._guards)

    @property
    def is_complete(self) -> bool:
        """Whether bytes and seconds of all blocks are known."""
        return len(self._bytes) == len(self._times) == len(self.blocks)

    def chain(self) -> Chain:
        """Returns the chain of the blocks and the head.

        The head is one stage that takes its largest memory, forward and backward, above the last block's output.
        """
        return make_chain(
            self.names,
            [self._bytes[index] for index in range(len(self.blocks))],
            self._smooth_times(),
            self._head_bytes,
            self._head_seconds,
            [self._gathered[index] for index in range(len(self.blocks))],
        )

    def _smooth_times(self) -> list[BlockTimes]:
        """Returns the times of the blocks; equal blocks get the medians of theirs, as noise would favour some.

        A block's forward has what its call waits for before it, such as the gathering of its parameters, in each run.
        """
        groups: dict[Any, list[int]] = {}
        for index, block in enumerate(self.blocks):
            shapes = tuple(parameter.shape for parameter in block.parameters())
            groups.setdefault((type(block).__qualname__, shapes, self._bytes[index]), []).append(index)
        found = dict(self._times)
        gathering: dict[int, float] = {}
        for members in groups.values():
            forward, backward = (
                tuple(map(statistics.median, zip(*(getattr(self._times[n], key) for n in members), strict=True)))
                for key in ("forward", "backward")
            )
            found |= dict.fromkeys(members, BlockTimes(forward, backward))
            waits = statistics.median(self._gathering[n] if self._gathered[n] else 0.0 for n in members)
            gathering |= dict.fromkeys(members, waits)
        for index, waited in gathering.items():
            forward = tuple(seconds + waited for seconds in found[index].forward)
            found[index] = BlockTimes(forward, found[index].backward)
        return [found[index] for index in range(len(self.blocks))]


def make_chain(
    names: Sequence[str],
    sizes: Sequence[BlockBytes],
    times: Sequence[BlockTimes],
    head: int,
    head_seconds: float,
    gathered: Sequence[int],
) -> Chain:
    """Returns the chain of measured blocks and a head.

    Args:
        names: Names of the blocks.
        sizes: Bytes of the blocks.
        times: Seconds of the blocks.
        head: Largest memory of the head's forward and backward, with the gradient of its input.
        head_seconds: Seconds of the head's forward and backward.
        gathered: Bytes of the blocks' parameters that are gathered for their forwards.
    """
    stages = []
    for name, size, spent, parameters in zip(names, sizes, times, gathered, strict=True):
        modes = tuple(
            Mode(
                mode,
                counted.saved,
                max(spent.forward[n], spent.forward[0]),  # No mode is faster than keeping all: that is noise.
                max(spent.backward[n], spent.backward[0]),
                counted.forward_peak,
                counted.backward_peak,
                counted.movable,
            )
            for n, (mode, counted) in enumerate(zip(MODES, size.modes, strict=False))
        )
        stages.append(Stage(name, size.output, modes, size.forward_peak, parameters))
    peak = max(0, head - (sizes[-1].output if sizes else 0))
    stages.append(Stage("head", 0, (Mode("all", 0, head_seconds / 3, head_seconds * 2 / 3, 0, peak),)))
    return Chain(tuple(stages), sizes[0].input if sizes else 0)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the bytes of tensors' storages by address; those of DTensors, which are shards, are left out."""
    found = (tensor_storage(tensor) for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in found if storage is not None}


def _has_foreign_hook(block: nn.Module) -> bool:
    hooks = [*block._forward_hooks.values(), *block._forward_pre_hooks.values()]
    return not all(_module_of(hook).startswith(_KNOWN_HOOKS) for hook in hooks)


def _module_of(hook: Any) -> str:
    """Returns the name of the module that defines a function, a partial one too."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""
