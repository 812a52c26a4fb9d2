"""Runs the blocks of a model by a schedule: each region of it is a nested checkpoint without reentrance.

The model calls its blocks itself. The first block's call of a region runs the full region, and the calls of the other
blocks return its output. Each block runs with its hooks, such as the gathering of FSDP and ZeRO 3, once for each
execution. A region inside a region is a checkpoint inside a checkpoint; torch's early stop may leave out the trailing
operations of a recomputation.

Of an offloaded node, autograd holds handles in place of the tensors that it saves: hooks for saved tensors pack them. A
handle's storage is copied to the host after the node's forward, its memory is released where the schedule says, and it
is copied back before the node's backward. What else refers to a tensor keeps it in memory, and reads right values.

Copies between the device and the host run on two streams of an accelerator, or are simulated on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dlo_framework.batches import tree_leaves
from dlo_framework.copy_streams import copy_streams, empty_host_tensor
from dlo_framework.errors import DloError
from dlo_framework.models.recompute import BufferGuard, checkpointed
from dlo_framework.units import parse_bytes
from dlo_plugins.memory.activation_checkpoint import contexts_for
from dlo_plugins.memory.block_calls import intercept_calls, is_same, own_call, restore_calls, split_hidden, with_hidden
from dlo_plugins.memory.block_survey import host_memory, tensor_storage
from dlo_plugins.memory.schedule import Keep, Link, Node, Recompute, Schedule, Transfer

_MEASURED_BYTES, _MEASURED_COPIES = 2**26, 4


class HostCopy:
    """Copy that has been started.

    Args:
        target: Tensor that is written.
        source: Tensor that is read; it lives until the copy has been waited for.
        wait: Function that makes the device wait for the copy.
        running: Copies of the link that have not been waited for.
    """

    def __init__(self, target: Tensor, source: Tensor, wait: Callable[[], None], running: set[HostCopy]) -> None:
        self._target, self._wait, self._running = target, wait, running
        self._source: Tensor | None = source
        running.add(self)

    def finish(self) -> Tensor:
        """Makes the device wait for the copy; returns the written tensor."""
        if self._source is not None:
            self._wait()
            self._running.discard(self)
            self._source = None
        return self._target


class HostLink:
    """Link between a device and the host; copies of one direction run one after another, beside computation."""

    def __init__(self) -> None:
        self._running: set[HostCopy] = set()

    def store(self, source: Tensor) -> HostCopy:
        """Starts a copy to the host, which runs after all work that the device has so far."""
        with host_memory():
            target = empty_host_tensor(source, source.device)
        return HostCopy(target, source, self._start(target, source, to_host=True), self._running)

    def load(self, source: Tensor, device: torch.device) -> HostCopy:
        """Allocates memory of the device, and starts a copy from the host into it."""
        target = torch.empty_like(source, device=device)
        return HostCopy(target, source, self._start(target, source, to_host=False), self._running)

    def finish_all(self) -> None:
        """Finishes the copies that a step has left, such as one that an error has ended."""
        for copy in list(self._running):
            copy.finish()

    def _start(self, target: Tensor, source: Tensor, to_host: bool) -> Callable[[], None]:
        """Starts a copy; returns the function that makes the device wait for it."""
        raise NotImplementedError


class StreamLink(HostLink):
    """Link of an accelerator: a stream for each direction, and page-locked memory; the host waits for no copy.

    A tensor's memory returns to the stream of computation after that stream has waited for the copy. The allocator
    therefore need not know the copies' streams, and the memory can be used again at once.

    Args:
        device: Accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._streams = copy_streams(device)

    def _start(self, target: Tensor, source: Tensor, to_host: bool) -> Callable[[], None]:
        stream = self._streams.down if to_host else self._streams.up
        return stream.copy(target, source, records=False).wait


class SimulatedLink(HostLink):
    """Link on a CPU, where device and host share their memory: a copy has arrived after its bytes divided by the rate.

    The bytes are copied when the copy is waited for, so that what is used before that has wrong values.

    Args:
        link: Rates.
        clock: Clock with `perf_counter` and `sleep`; by default waiting takes real time.
    """

    def __init__(self, link: Link, clock: Any = time) -> None:
        super().__init__()
        self.link, self.clock = link, clock
        self._free = {True: 0.0, False: 0.0}  # Seconds at which each direction has run all copies so far.

    def _start(self, target: Tensor, source: Tensor, to_host: bool) -> Callable[[], None]:
        rate = self.link.to_host if to_host else self.link.to_device
        end = self._free[to_host] = max(self.clock.perf_counter(), self._free[to_host]) + source.nbytes / rate

        def wait() -> None:
            target.copy_(source)
            self.clock.sleep(max(0.0, end - self.clock.perf_counter()))

        return wait


def parse_link(text: str) -> Link | None:
    """Returns the link of a config: ``12GB/s`` in both directions, or None for ``auto``.

    Raises:
        DloError: It is neither.
    """
    if str(text).strip() == "auto":
        return None
    try:
        rate = parse_bytes(str(text).strip().removesuffix("/s"), "link")
    except DloError as error:
        raise DloError(f"link must be a rate such as 25GB/s, or auto, got {text}; set one of these") from error
    return Link(rate, rate)


def measure_link(device: torch.device) -> Link:
    """Returns the rates of page-locked copies, both directions at the same time, by an accelerator's events."""
    module, link = torch.get_device_module(device), StreamLink(device)
    there = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=device)
    here = empty_host_tensor(there, device)
    seconds = []
    for _ in range(_MEASURED_COPIES):
        begin, ends = module.Event(enable_timing=True), [module.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        copies = link.store(there), link.load(here, device)
        for copy, end in zip(copies, ends, strict=True):
            copy.finish()
            end.record()
        module.synchronize(device)
        seconds.append([begin.elapsed_time(end) / 1e3 for end in ends])
    # The first copy allocates. The later of two that run at once is waited for last, so its time is the upper bound.
    best = [min(run[direction] for run in seconds[1:]) for direction in (0, 1)]
    return Link(*(_MEASURED_BYTES / max(each, 1e-9) for each in best))


class StoredStorage:
    """Storage of saved tensors, which is on the device or on the host.

    Args:
        storage: Storage on the device.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._device, self._size = storage.device, storage.nbytes()
        self._handles: list[weakref.ref[PackedTensor]] = []
        self._copy: HostCopy | None = None
        self._there: Tensor | None = None  # bytes on the host
        self._here: Tensor | None = None  # bytes on the device, once they are back

    def add(self, handle: PackedTensor) -> None:
        """Adds a saved tensor of the storage."""
        self._handles.append(weakref.ref(handle))

    def start_store(self, link: HostLink) -> None:
        """Starts the copy to the host; a storage that nothing saves, or whose owner has freed it, stays."""
        tensor = next((handle.tensor for ref in self._handles if (handle := ref()) is not None), None)
        if tensor is not None and tensor.untyped_storage().nbytes() == self._size:
            self._copy = link.store(_bytes_of(tensor.untyped_storage()))

    def release(self) -> None:
        """Waits for the copy to the host, and gives up the memory of the device."""
        if self._copy is not None:
            self._there, self._copy = self._copy.finish(), None
            for ref in self._handles:
                if (handle := ref()) is not None:
                    handle.drop_tensor()
        self._handles = []

    def start_load(self, link: HostLink) -> None:
        """Starts the copy to the device."""
        if self._there is not None:
            self._copy, self._there = link.load(self._there, self._device), None

    def arrive(self) -> None:
        """Waits for the copy to the device."""
        if self._copy is not None:
            self._here, self._copy = self._copy.finish(), None

    def view(self, link: HostLink, dtype: torch.dtype, size: Any, stride: Any, offset: Any) -> Tensor:
        """Returns a tensor of the storage on the device, to which it is copied first where it is not there."""
        self.start_load(link)
        self.arrive()
        assert self._here is not None
        empty = torch.empty(0, dtype=dtype, device=self._device)
        return empty.set_(self._here.untyped_storage(), offset, size, stride)


class PackedTensor:
    """What autograd holds in place of a saved tensor.

    Args:
        tensor: Tensor.
        stored: Storage of the tensor.
        link: Link of the storage's copies.
    """

    def __init__(self, tensor: Tensor, stored: StoredStorage, link: HostLink) -> None:
        self.tensor: Tensor | None = tensor
        self._stored, self._version = stored, tensor._version
        self._view = functools.partial(
            stored.view, link, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        )
        stored.add(self)

    def drop_tensor(self) -> None:
        """Gives up the tensor on the device."""
        self._check()
        self.tensor = None

    def unpack(self) -> Tensor:
        """Returns the tensor on the device."""
        if self.tensor is None:
            return self._view()
        self._check()
        return self.tensor

    def _check(self) -> None:
        if self.tensor is not None and self.tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(self.tensor.shape)} is at version {self.tensor._version}, saved at"
                f" {self._version}"
            )


class _Packer:
    """Hook that packs the tensors that a running node saves.

    Autograd keeps the hook until the backward, so it must not keep the node's tensors.

    Args:
        link: Link of the copies.
        apart: Function that returns the tensors that stay on the device.

    Attributes:
        storages: Storages of packed tensors, by address.
        staying: Addresses of the storages whose tensors are not packed.
    """

    def __init__(self, link: HostLink, apart: Callable[[], Iterable[Tensor]]) -> None:
        self._link, self._apart = link, apart
        self.storages: dict[int, StoredStorage] = {}
        self.staying: set[int] = set()

    def pack(self, tensor: Tensor) -> Tensor | PackedTensor:
        """Returns a handle of a saved tensor, or the tensor if it stays on the device."""
        if self._apart is not _nothing:  # At the first saved tensor, the parameters are gathered.
            known = (tensor_storage(one) for one in self._apart())
            self.staying.update(one._cdata for one in known if one is not None)
            self._apart = _nothing
        storage = tensor_storage(tensor) if type(tensor) is Tensor else None
        if storage is None or storage._cdata in self.staying or not storage.nbytes():
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            return tensor
        stored = self.storages.setdefault(storage._cdata, StoredStorage(storage))
        return PackedTensor(tensor, stored, self._link)

    def close(self) -> dict[int, StoredStorage]:
        """Returns the storages, and forgets them."""
        storages, self.storages, self._apart = self.storages, {}, _nothing
        return storages


def _nothing() -> Iterable[Tensor]:
    return ()


class OffloadedPass:
    """Copies of one forward and backward of a chain.

    Args:
        nodes: Nodes of the schedule, the head's last.
        transfers: Points of the copies.
        link: Link.
    """

    def __init__(self, nodes: Sequence[Node], transfers: Sequence[Transfer], link: HostLink) -> None:
        self._nodes, self._link = nodes, link
        self._storages: dict[int, list[StoredStorage]] = {}  # of each offloaded node, from its forward to its backward
        self._unreleased, self._unloaded = list(transfers), list(reversed(transfers))
        self._packer: _Packer | None = None  # of the running node
        self._input: StoredStorage | None = None  # of the next node, where the node before it saves its own output

    def before_forward(self, index: int) -> None:
        """Releases the memory that is needed from a node's forward on; the number of nodes stands for all of it."""
        while self._unreleased and self._unreleased[0].release <= index:
            for stored in self._storages.get(self._unreleased.pop(0).node, ()):
                stored.release()

    def saving(
        self, index: int, hidden: Tensor, apart: Callable[[], Iterable[Tensor]]
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a node's forward.

        Args:
            index: Number of the node.
            hidden: Input of the node.
            apart: Function that returns the tensors that stay on the device: parameters, buffers, other arguments.
        """
        node = self._nodes[index]
        given, self._input = self._input, None
        if not node.offload and not (self._is_offloaded(index + 1) and isinstance(node, Keep) and node.mode == 0):
            return contextlib.nullcontext()
        self._packer = _Packer(self._link, apart)
        own = tensor_storage(hidden)
        if own is not None and node.offload and index:
            self._packer.storages[own._cdata] = given or StoredStorage(own)
        elif own is not None:
            self._packer.staying.add(own._cdata)
        return saved_tensors_hooks(self._packer.pack, _unpack)

    def after_forward(self, index: int, output: Tensor) -> None:
        """Starts the copies of a node to the host; what saves its output goes with the next node."""
        storage, storages = tensor_storage(output), {} if self._packer is None else self._packer.close()
        self._packer = None
        self._input = storages.pop(storage._cdata, None) if storage is not None else None
        if self._is_offloaded(index):
            self._storages[index] = list(storages.values())
            for stored in self._storages[index]:
                stored.start_store(self._link)
        if output.requires_grad:
            output.register_hook(functools.partial(self._before_backward, index))

    def begin_backward(self) -> None:
        """Begins the backward, with the head's."""
        self._load(len(self._nodes) - 1)

    def _before_backward(self, index: int, gradient: Tensor) -> None:
        self._load(index)
        for stored in self._storages.pop(index, ()):
            stored.arrive()

    def _load(self, index: int) -> None:
        """Starts the copies to the device that begin before a node's backward or before that of a later one."""
        self.before_forward(len(self._nodes))
        while self._unloaded and self._unloaded[0].prefetch >= index:
            for stored in self._storages.get(self._unloaded.pop(0).node, ()):
                stored.start_load(self._link)

    def _is_offloaded(self, index: int) -> bool:
        return index < len(self._nodes) and self._nodes[index].offload


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _unpack(held: Tensor | PackedTensor) -> Tensor:
    return held if isinstance(held, Tensor) else held.unpack()


class ScheduledBlocks:
    """Blocks that run by a schedule until :meth:`remove`.

    Args:
        blocks: Blocks, in the order in which the model calls them.
        names: Names of the blocks.
        schedule: Schedule that covers the blocks; further stages, such as the head, are the model's own.
        link: Link of the schedule's copies; None for a schedule without.
        releases_early: Whether the copies to the host end before the forward of the head, because several forwards run
            before a backward.

    Attributes:
        forwards: Number of executions of each block's forward in training since the last :meth:`reset_counts`.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        names: Sequence[str],
        schedule: Schedule,
        link: HostLink | None = None,
        releases_early: bool = False,
    ) -> None:
        self._blocks, self._names, self._schedule = list(blocks), list(names), schedule
        self._link, self._releases_early = (link if schedule.transfers else None), releases_early
        self._pass: OffloadedPass | None = None
        self._number_of: dict[int, int] = {}  # Number of each block's node.
        for number, node in enumerate(schedule.nodes):
            self._number_of |= dict.fromkeys(range(node.first, min(node.last + 1, len(blocks))), number)
        self._guards: dict[tuple[int, int], BufferGuard] = {}
        self._keeps = True  # Whether this run of the blocks is the one whose activations backward uses.
        self._passing: tuple[Node, Any, Any] | None = None  # region that has run, its output, its other arguments
        self.forwards = [0] * len(blocks)
        for index, block in enumerate(self._blocks):
            intercept_calls(block, self._handler(index))

    def remove(self) -> None:
        """Makes the blocks run as they did before, and finishes the copies that are left."""
        for block in self._blocks:
            restore_calls(block)
        self.begin_step()

    def reset_counts(self) -> None:
        """Sets the numbers of executed forwards to 0."""
        self.forwards = [0] * len(self._blocks)

    def begin_step(self) -> None:
        """Finishes the copies that the step before has left, if an error has ended it."""
        self._pass = None
        if self._link is not None:
            self._link.finish_all()

    def begin_backward(self) -> None:
        """Begins the copies back to the device that have the head's backward to run beside."""
        if self._pass is not None and not self._releases_early:
            self._pass.begin_backward()

    def _handler(self, index: int) -> Callable[..., Any]:
        def call(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.is_grad_enabled():
                return own(*args, **kwargs)
            number = self._number_of[index]
            node = self._schedule.nodes[number]
            hidden, rest = split_hidden(args, kwargs)
            if index != node.first:
                return self._pass_on(index, node, hidden, rest)
            self._passing = None

            others = with_hidden(args, kwargs, None)  # Backward keeps them, and must not keep the hidden state.

            def run(block: int, value: Any) -> Any:
                new_args, new_kwargs = with_hidden(*others, value)
                return own_call(self._blocks[block])(*new_args, **new_kwargs)

            output = self._run(node, hidden, run) if self._link is None else self._offload(number, hidden, rest, run)
            if node.last > node.first:
                self._passing = node, output, rest
            return output

        return call

    def _pass_on(self, index: int, node: Node, hidden: Any, rest: Any) -> Any:
        """Returns the output of the region that has run, which a later block of it gets as its input."""
        passing = self._passing
        leaves = tree_leaves(rest)
        if passing is None or passing[0] is not node or hidden is not passing[1]:
            raise DloError(
                f"blocks of a region must pass their output on unchanged, got another input of '{self._names[index]}'"
                " than in the step that was measured; remove what depends on values, or leave Rotor out"
            )
        known = tree_leaves(passing[2])
        if len(leaves) != len(known) or not all(map(is_same, leaves, known)):
            raise DloError(
                f"blocks of a region must get the same other arguments, got others for '{self._names[index]}' than for"
                f" '{self._names[node.first]}'; remove what depends on values, or leave Rotor out"
            )
        if index == node.last:
            self._passing = None
        return hidden

    def _offload(self, number: int, hidden: Any, rest: Any, run: Callable[[int, Any], Any]) -> Any:
        """Runs a node of a schedule with copies to the host."""
        assert self._link is not None
        nodes = self._schedule.nodes
        if number == 0 or self._pass is None:
            self._pass = OffloadedPass(nodes, self._schedule.transfers, self._link)
        node, here = nodes[number], self._pass

        def apart() -> Iterator[Tensor]:
            for block in self._blocks[node.first : node.last + 1]:
                yield from (*block.parameters(), *block.buffers())
            yield from (leaf for leaf in tree_leaves(rest) if isinstance(leaf, Tensor))

        here.before_forward(number)
        cache = _without_weight_cache(hidden) if node.offload else contextlib.nullcontext()
        with cache, here.saving(number, hidden, apart):
            output = self._run(node, hidden, run)
        here.after_forward(number, output)
        if number + 2 == len(nodes):
            here.before_forward(len(nodes) if self._releases_early else number + 1)
        return output

    def _run(self, node: Node, hidden: Any, run: Callable[[int, Any], Any]) -> Any:
        """Runs a node on a hidden state; returns the output of its last block."""
        if isinstance(node, Keep):
            if node.mode == 0:
                return self._execute(node.stage, hidden, run)
            context_fn = contexts_for(self._blocks[node.stage]) if self._keeps else None
            self.forwards[node.stage] += 1
            guard = self._guard(node.stage, node.stage)
            return checkpointed(lambda value: run(node.stage, value), hidden, guard=guard, context_fn=context_fn)
        return self._run_region(node, hidden, run)

    def _run_region(self, region: Recompute, hidden: Any, run: Callable[[int, Any], Any]) -> Any:
        def inside(value: Tensor) -> Tensor:
            for node in region.inner:
                value = self._run(node, value, run)
            return value

        with _without_weight_cache(hidden):
            return checkpointed(
                inside, hidden, guard=self._guard(region.first, region.last), context_fn=self._region_contexts
            )

    def _execute(self, index: int, hidden: Any, run: Callable[[int, Any], Any]) -> Any:
        self.forwards[index] += 1
        return run(index, hidden)

    def _guard(self, first: int, last: int) -> BufferGuard:
        key = first, last
        if key not in self._guards:
            self._guards[key] = BufferGuard(*self._blocks[first : last + 1])
        return self._guards[key]

    def _region_contexts(self) -> tuple[Any, Any]:
        """Returns contexts of a region's run, which keeps nothing, and of its recomputation, whose nodes do."""
        return self._keeping(False), self._keeping(True)

    @contextlib.contextmanager
    def _keeping(self, keeps: bool) -> Iterator[None]:
        before, self._keeps = self._keeps, keeps
        try:
            yield
        finally:
            self._keeps = before


@contextlib.contextmanager
def _without_weight_cache(hidden: Any) -> Iterator[None]:
    """Turns off autocast's cache of cast weights, which would keep a region's until the end of the forward."""
    kind = hidden.device.type if isinstance(hidden, Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind) or not torch.is_autocast_cache_enabled():
        yield
        return
    with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False):
        yield
