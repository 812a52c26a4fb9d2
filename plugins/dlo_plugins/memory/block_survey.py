"""Survey of a chain of blocks in real steps: bytes in one step, seconds in another, and whether regions are possible.

While it is on, each block recomputes its activations, so that the steps need little memory; their results are those of
any other step. A block is measured on detached inputs, forward and backward, without an effect on the step: gradients
are returned and dropped, and random state and buffers are restored. The gradients of parameters are not counted, as a
step keeps them in any mode.

Bytes are those of a log of the memory that tensors take while it is on: each allocation and release of a storage, in
order. It counts what operators return, on any device, also on fake tensors. Memory that a kernel allocates and frees
inside one operator, and the inside of compiled code, is not seen.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.batches import tree_leaves, tree_map
from dlo_framework.distributed.stacks import module_of
from dlo_framework.errors import DloError
from dlo_framework.models.recompute import BufferGuard, checkpointed, in_backward, recomputes
from dlo_plugins.memory.activation_checkpoint import contexts_for
from dlo_plugins.memory.block_calls import RegionCheck, intercept_calls, restore_calls
from dlo_plugins.memory.schedule import Chain, Mode, Stage

#: Modes of a block that stays in a schedule: the names of :class:`~dlo_plugins.memory.schedule.Mode`.
MODES = ("all", "selective")
_REPEATS = 3
#: Share of a block's kept bytes that hooks must see: the rest are small, such as the state of random numbers.
_MOVABLE_SHARE = 0.99


class BlockRun:
    """Runs of a block on detached copies of a call's arguments.

    Args:
        block: Block, with its parameters gathered.
        forward: Forward of the block.
        args: Arguments of the call.
        kwargs: Arguments by name.
        clock: Function that returns seconds.
    """

    def __init__(
        self,
        block: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        clock: Callable[[], float],
    ) -> None:
        self._clock, self._block, self._forward, self._given = clock, block, forward, (args, kwargs)
        self._guard = BufferGuard(block)
        self._trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
        tensors = [leaf for leaf in tree_leaves(self._given) if isinstance(leaf, Tensor)]
        self.hidden = storage_bytes(tensors[:1])
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def forward(self, mode: str) -> tuple[list[Tensor], list[Tensor]]:
        """Runs forward; returns the inputs and the outputs that have gradients."""
        args, kwargs = tree_map(detached, self._given)
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

    def count_bytes(self, log: AllocationLog) -> Stage:
        """Returns the block as a stage with bytes and without seconds.

        Args:
            log: Log, which is on.
        """
        with self._isolated():
            start = log.mark()
            args, kwargs = tree_map(detached, self._given)
            # With gradients, as in a region: some operators in place copy their input then.
            torch.clear_autocast_cache()
            outputs = checkpointed(self._forward, *args, **kwargs)
            torch.clear_autocast_cache()
            output = storage_bytes(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
            plain = log.usage(start)
            del outputs, args, kwargs
            modes = tuple(self._count_mode(log, mode, output) for mode in self.possible_modes())
        return Stage("", output, modes, max(0, plain.peak - output))

    def _count_mode(self, log: AllocationLog, mode: str, output: int) -> Mode:
        start, packed = log.mark(), _PackedBytes()
        with saved_tensors_hooks(packed.pack, lambda tensor: tensor) if mode == MODES[0] else contextlib.nullcontext():
            inputs, outputs = self.forward(mode)
        kept = log.usage(start)
        saved = max(kept.final, output)
        # Selective checkpoints keep tensors that no hook sees, and so do functions in attributes of their contexts.
        movable = mode == MODES[0] and packed.count(log, start, outputs) >= _MOVABLE_SHARE * (saved - output)
        gradients = [torch.zeros_like(tensor) for tensor in outputs]
        source_grads = self.backward(inputs, outputs, gradients)
        own = log.numbers(gradient for gradient in source_grads[len(inputs) :] if gradient is not None)
        peak = log.usage(start, without=own).peak
        del source_grads, gradients, inputs, outputs
        transient = max(0, kept.peak - saved), max(0, peak - saved - output - self.hidden)
        return Mode(mode, saved, 0.0, 0.0, *transient, movable)

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

    def measure_seconds(self, modes: int) -> list[tuple[float, float]]:
        """Returns the seconds of forward and backward in each mode, the shortest of a few runs.

        Args:
            modes: Number of the modes in which the block can run.
        """
        with self._isolated():
            self._seconds(MODES[0])  # The first run allocates, and chooses kernels.
            by_mode = [[self._seconds(mode) for _ in range(_REPEATS)] for mode in MODES[:modes]]
        return [(min(forward for forward, _ in runs), min(backward for _, backward in runs)) for runs in by_mode]

    def _seconds(self, mode: str) -> tuple[float, float]:
        begin = self._now()
        inputs, outputs = self.forward(mode)
        middle = self._now()
        gradients = [torch.zeros_like(tensor) for tensor in outputs]
        ready = self._now()
        self.backward(inputs, outputs, gradients)
        return middle - begin, self._now() - ready

    def _now(self) -> float:
        return _seconds(self.device, self._clock)

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


def _seconds(device: torch.device, clock: Callable[[], float]) -> float:
    """Returns a clock's seconds once a device has run what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


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


def detached(value: Any) -> Any:
    """Returns a tensor apart from its graph; other arguments as they are."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _differentiable(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


#: Modules whose hooks on blocks may run once for each execution of a block.
_KNOWN_HOOKS = ("torch.", "lightning.", "dlo_framework.", "dlo_plugins.", "deepspeed.")


class BlockSurvey:
    """Survey of the blocks of one chain.

    Args:
        blocks: Blocks, in the order in which the model calls them.
        names: Names of the blocks.
        is_last: Whether the model's head and its loss follow the blocks on this rank.
        parameters: Function that returns the parameters of the model as they are now.
        clock: Function that returns seconds.
        full_gradients: Whether each rank keeps full gradients. Where it does not, the buffers of those of the stem
            cannot be told from its activations, and the peak of its backward is not measured.

    Attributes:
        log: Log of the step in which bytes are measured; None in others.
        stem_backward: Peak of the bytes while the backward before the first block runs, after that of the blocks; 0 if
            not measured.
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
        clock: Callable[[], float] = time.perf_counter,
        full_gradients: bool = True,
    ) -> None:
        self.blocks, self.names, self._is_last, self._parameters = list(blocks), list(names), is_last, parameters
        self._clock, self._full_gradients = clock, full_gradients
        self.stem_backward = self._stem_start = 0  # Its position in the log.
        self.log: AllocationLog | None = None
        self.times_blocks = False
        self._stem = 0
        self._check = RegionCheck(self.names)
        self._input = 0
        self._bytes: dict[int, Stage] = {}
        self._times: dict[int, list[tuple[float, float]]] = {}  # of forward and backward, in each mode
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
            return self._check.leave(index, output)

        return call

    def _measured(self, index: int, block: nn.Module) -> Callable[..., Any]:
        forward, guard = block.forward, self._guards[index]

        def measured(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            run = BlockRun(block, forward, args, kwargs, self._clock)
            self._device = run.device
            if self.log is not None and index == 0:
                self._mark_stem((args, kwargs))
            if self.log is not None and index not in self._bytes:
                if index == 0:
                    parameters = self.log.numbers(self._parameters())
                    self._input = run.hidden
                    self._stem = max(0, self.log.usage(0, without=parameters).final - run.hidden)
                stage, own = run.count_bytes(self.log), _storages(block.parameters())
                gathered = sum(size for key, size in own.items() if key not in self._resident)
                self._bytes[index] = replace(stage, gathered=gathered)
            elif self.times_blocks and index in self._bytes and index not in self._times:
                self._gathering[index] = self._now() - self._called
                self._times[index] = run.measure_seconds(len(self._bytes[index].modes))
            return checkpointed(forward, *args, guard=guard, **kwargs)

        return measured

    def _mark_stem(self, inputs: Any) -> None:
        """Notes where the blocks' backward of a micro-batch ends: of the last one, no other is in flight."""
        log = self.log

        def mark(_: Tensor) -> None:
            if log is not None and log is self.log:
                self._stem_start = log.mark()

        for hidden in _differentiable(inputs)[:1]:
            hidden.register_hook(mark)

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
            usage = self.log.usage(*self._head, without=buffers - self._head_gradient, releases=True)
            self._head_bytes = max(0, usage.peak - self._head_left)
        if self.log is not None and self._stem_start and self._full_gradients:
            buffers = self.log.left_by_backward(0) | self.log.numbers(gradients)
            self.stem_backward = self.log.backward_peak(self._stem_start, buffers)
        self.log, self._stem_start = None, 0

    def _now(self) -> float:
        return _seconds(self._device, self._clock)

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
        times, stages = self._smooth_times(), []
        for index, name in enumerate(self.names):
            stage, own = self._bytes[index], times[index]
            modes = tuple(
                replace(mode, forward=max(forward, own[0][0]), backward=max(backward, own[0][1]))
                for mode, (forward, backward) in zip(stage.modes, own, strict=True)
            )  # No mode is faster than keeping all: that is noise.
            stages.append(replace(stage, name=name, modes=modes))
        peak = max(0, self._head_bytes - (stages[-1].output if stages else 0))
        seconds = self._head_seconds
        stages.append(Stage("head", 0, (Mode("all", 0, seconds / 3, seconds * 2 / 3, 0, peak),)))
        return Chain(tuple(stages), self._input)

    def _smooth_times(self) -> dict[int, list[tuple[float, float]]]:
        """Returns the times of the blocks; equal blocks get the medians of theirs, as noise would favour some.

        A block's forward has what its call waits for before it, such as the gathering of its parameters, in each run.
        """
        groups: dict[Any, list[int]] = {}
        for index, block in enumerate(self.blocks):
            shapes = tuple(parameter.shape for parameter in block.parameters())
            groups.setdefault((type(block).__qualname__, shapes, self._bytes[index]), []).append(index)
        times: dict[int, list[tuple[float, float]]] = {}
        for members in groups.values():
            waits = statistics.median(self._gathering[n] if self._bytes[n].gathered else 0.0 for n in members)
            of_modes = zip(*(self._times[n] for n in members), strict=True)
            medians = [tuple(map(statistics.median, zip(*runs, strict=True))) for runs in of_modes]
            own = [(forward + waits, backward) for forward, backward in medians]
            times |= dict.fromkeys(members, own)
        return times


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the bytes of tensors' storages by address; those of DTensors, which are shards, are left out."""
    storages = (tensor_storage(tensor) for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages if storage is not None}


def _has_foreign_hook(block: nn.Module) -> bool:
    hooks = [*block._forward_hooks.values(), *block._forward_pre_hooks.values()]
    return not all(module_of(hook).startswith(_KNOWN_HOOKS) for hook in hooks)


@dataclass(frozen=True)
class Usage:
    """Memory of the storages that were allocated in a section of the log.

    Attributes:
        peak: Largest number of bytes at one time.
        final: Bytes at the section's end.
    """

    peak: int
    final: int


class _HostMemory:
    """Number of contexts in which new storages are the host's."""

    depth = 0


@contextlib.contextmanager
def host_memory() -> Iterator[None]:
    """Makes logs leave out the storages that are allocated inside: they are the host's, also where it is the device."""
    _HostMemory.depth += 1
    try:
        yield
    finally:
        _HostMemory.depth -= 1


class AllocationLog(TorchDispatchMode):
    """Mode that logs the allocation and release of storages, each with a number.

    Args:
        device: Device of the storages that are logged; None for all.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        self._device = device
        self._events: list[tuple[int, int]] = []  # number of the storage, bytes; negative for a release
        self._seen: dict[int, tuple[int, Any]] = {}  # number and weak reference by address; 0 for storages from before
        self._count = 0
        self._in_backward: set[int] = set()  # numbers of the storages that a backward has allocated

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator, and logs the storages of its results that are not those of its arguments."""
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, is_new=False)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._note(tensor, is_new=True)
        return result

    def _note(self, tensor: Tensor, is_new: bool) -> None:
        storage = tensor_storage(tensor)
        if storage is None or storage._cdata in self._seen:
            return
        address, size, number = storage._cdata, storage.nbytes(), 0
        if is_new and not _HostMemory.depth and self._device in (None, storage.device):
            self._count = number = self._count + 1
            self._events.append((number, size))
            if in_backward():
                self._in_backward.add(number)

        def released(_: Any) -> None:
            del self._seen[address]
            if number:
                self._events.append((number, -size))

        self._seen[address] = number, weakref.ref(storage, released)

    def mark(self) -> int:
        """Returns the current position in the log."""
        return len(self._events)

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Returns the numbers of the storages of tensors; those from before the log have none."""
        numbers = set()
        for tensor in tensors:
            storage = tensor_storage(tensor)
            if storage is not None and storage._cdata in self._seen:
                numbers.add(self._seen[storage._cdata][0])
        return numbers - {0}

    def allocated_bytes(
        self, storages: Iterable[torch.UntypedStorage], start: int, without: Collection[int] = ()
    ) -> int:
        """Returns the bytes of those of some storages that were allocated after a position, each counted once.

        Args:
            storages: Storages.
            start: Position in the log.
            without: Numbers of storages that are not counted.
        """
        born = {number for number, size in self._events[start:] if size >= 0} - {*without}
        sizes = {s._cdata: s.nbytes() for s in storages if self._seen.get(s._cdata, (0, None))[0] in born}
        return sum(sizes.values())

    def left_by_backward(self, start: int, end: int | None = None) -> set[int]:
        """Returns the numbers of the storages that a backward has allocated in a section, and not released in it."""
        section = self._events[start:end]
        return {number for number, size in section if size >= 0 and number in self._in_backward} - {
            number for number, size in section if size < 0
        }

    def usage(
        self, start: int, end: int | None = None, without: Collection[int] = (), *, releases: bool = False
    ) -> Usage:
        """Returns the memory of the storages that were allocated in a section.

        Args:
            start: Position of the section's start.
            end: Position of its end; by default the current one.
            without: Numbers of storages that are not counted.
            releases: Whether releases of storages from before the section count too, relative to its start.
        """
        level = peak = 0
        born: set[int] = set()
        for number, size in self._events[start:end]:
            if size >= 0:
                born.add(number)
            if number not in without and (releases or number in born):
                level += size
                peak = max(peak, level)
        return Usage(peak, level)

    def backward_peak(self, start: int, without: Collection[int]) -> int:
        """Returns the largest number of bytes at one time from a position on, of all that a backward has then.

        Args:
            start: Position, in a backward.
            without: Numbers of storages that are not counted.
        """
        later = {number for number, size in self._events[start:] if size >= 0 and number not in self._in_backward}
        rise = self.usage(start, without={*without, *later}, releases=True).peak
        return self.usage(0, start, without).final + rise


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors' storages, each counted once."""
    return sum(_storages(tensors).values())


def _tensors(value: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def tensor_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Returns a tensor's storage; None for one without storage of its own, such as a DTensor."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None
