"""Collectives of sharding: asynchronous reduce-scatter and all-gather of flat buffers, and a few for small tensors.

For tensors of an accelerator they are torch's own. For CPU tensors on gloo (torch 2.15), torch's reduce-scatter and
all-gather take 1.5 to 2.2 times as long as an all-reduce of the same buffer, which does the work of both. Exchanging
the segments between pairs of ranks takes a half and a third of their time (``benchmarks/collectives.py``), so here each
rank sends each other rank its segment, and adds up the segments that it receives.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.fake_kernels import FakeTensor

#: Most receive buffers of reduce-scatters to keep; as many as are in flight at once.
_SPARES = 2
#: Functional collectives: torch.compile traces them, and they are defined for meta tensors.
_OPS = torch.ops._c10d_functional
#: Functions that are called before a collective that pairs of ranks exchange as messages, with its kind, the name of
#: its group, its buffer and the number of messages that follow: a counter of communication would see these alone.
PAIRWISE_LISTENERS: list[Callable[[str, str, Tensor, int], None]] = []


class Pending:
    """Handle of a collective in flight.

    Args:
        works: Handles of the torch operations that the collective consists of.
        finish: Function that returns the result, called once the operations are done.
        limit: Time limit of each operation; None for the group's.
    """

    def __init__(self, works: list[dist.Work], finish: Callable[[], Tensor], limit: timedelta | None = None) -> None:
        self._works, self._limit = works, limit
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Waits for the collective (on an accelerator, the current stream waits) and returns the result."""
        if self._finish is not None:
            for work in self._works:
                if self._limit is None:
                    work.wait()
                else:
                    work.wait(self._limit)
            self._result, self._finish, self._works = self._finish(), None, []
        assert self._result is not None
        return self._result


class Communicator:
    """Collectives of a process group, with a count of the elements sent.

    Attributes:
        group: Process group; None for the default group.
        rank: Number of this rank in the group.
        size: Number of ranks in the group.
        elements: Number of elements sent so far, by collective; a buffer of n elements counts n, as in the ZeRO paper.
        skips_alone: Whether to skip collectives in a group of one rank. If false, they run there too, so that one
            accelerator is enough to test and to measure them.
    """

    skips_alone = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.elements: Counter[str] = Counter()
        self._averages = "nccl" in str(dist.get_backend(group))
        self._name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
        self._limit = exchange_limit(group) if backend_of(group, torch.device("cpu")) == "gloo" else None
        self._spare: list[Tensor] = []

    def segment(self, buffer: Tensor, rank: int | None = None) -> Tensor:
        """Returns a rank's segment of a flat buffer of `size` equal segments; this rank's by default."""
        length = buffer.numel() // self.size
        start = (self.rank if rank is None else rank) * length
        return buffer[start : start + length]

    def reduce_scatter(self, buffer: Tensor, *, average: bool = False) -> Pending:
        """Sums a flat buffer over the ranks; the result is this rank's segment of the sum, maybe a view of the buffer.

        Args:
            buffer: Tensor `[size * n]`, which is overwritten.
            average: Whether to return the mean over the ranks instead of the sum.

        On gloo, the receive buffers are kept for the next reduce-scatter, until :meth:`release`: mapping new memory
        takes longer than the sum.
        """
        self.elements["reduce_scatter"] += buffer.numel()
        own = self.segment(buffer)
        if self.size == 1 and self.skips_alone:
            return Pending([], lambda: own)
        in_pairs = self._in_pairs(buffer)
        op = dist.ReduceOp.AVG if average and self._averages and not in_pairs else dist.ReduceOp.SUM
        average = average and op == dist.ReduceOp.SUM  # Whether a division is still to be done.
        if average and buffer.dtype == torch.float16:  # The sum may overflow in float16.
            buffer.div_(self.size)
            average = False
        if not in_pairs:
            result = torch.empty_like(own)
            work = dist.reduce_scatter_tensor(_real(result), _real(buffer), op=op, group=self.group, async_op=True)
            assert work is not None
            return Pending([work], lambda: result.div_(self.size) if average else result)
        self._announce("reduce_scatter", buffer)
        memory = self._receive_buffer((self.size - 1) * own.numel(), buffer)
        received = memory[: (self.size - 1) * own.numel()].view(self.size - 1, own.numel())
        works: list[dist.Work] = []
        for step, row in enumerate(received, start=1):
            works += self._exchange_with(self.segment(buffer, (self.rank + step) % self.size), row, step)

        def add_up() -> Tensor:
            for row in received:
                own.add_(row)
            if average:
                own.div_(self.size)
            if len(self._spare) < _SPARES:
                self._spare.append(memory)
            return own

        return Pending(works, add_up, self._limit)

    def all_gather(self, buffer: Tensor) -> Pending:
        """Gathers all ranks' segments into a flat buffer, of which each rank has filled its own; returns the buffer."""
        self.elements["all_gather"] += buffer.numel()
        own = self.segment(buffer)
        if self.size == 1 and self.skips_alone:
            return Pending([], lambda: buffer)
        if not self._in_pairs(buffer):
            work = dist.all_gather_into_tensor(buffer, own, group=self.group, async_op=True)
            assert work is not None
            return Pending([work], lambda: buffer)
        self._announce("all_gather", buffer)
        works: list[dist.Work] = []
        for step in range(1, self.size):
            works += self._exchange_with(own, self.segment(buffer, (self.rank - step) % self.size), step)
        return Pending(works, lambda: buffer, self._limit)

    def exchange(self, sent: list[Tensor], received: list[int]) -> list[Tensor]:
        """Sends each rank a flat tensor of any length, and returns the tensors that this rank gets (all-to-all).

        Args:
            sent: One 1-D tensor for each rank, in the order of ranks, all of one dtype.
            received: Lengths of the tensors that the ranks send to this one, in the same order.
        """
        lengths = [tensor.numel() for tensor in sent]
        self.elements["exchange"] += sum(lengths)
        if self.size == 1 and self.skips_alone:
            return sent
        result = sent[0].new_empty(sum(received))
        dist.all_to_all_single(result, torch.cat(sent), received, lengths, group=self.group)
        return list(result.split(received))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks as a new tensor.

        This and the next five methods are defined for meta tensors; torch.compile traces them, without the count.
        """
        return self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts to sum a tensor over the ranks; returns a function that waits for the sum and returns it."""
        self._count("all_reduce", tensor.numel())
        started = _OPS.all_reduce(tensor.contiguous(), "sum", self._name)
        return lambda: _OPS.wait_tensor(started)

    def all_gather_parts(self, part: Tensor) -> Tensor:
        """Gathers a tensor of the same shape from each rank; returns `[size, *part.shape]`."""
        return self.start_all_gather_parts(part)()

    def start_all_gather_parts(self, part: Tensor) -> Callable[[], Tensor]:
        """Starts :meth:`all_gather_parts`; returns a function that waits for the result and returns it."""
        self._count("all_gather", part.numel() * self.size)
        flat = part.contiguous().view(-1)
        started = _OPS.all_gather_into_tensor(flat, self.size, self._name)
        return lambda: _OPS.wait_tensor(started).view(self.size, *part.shape)

    def reduce_scatter_parts(self, parts: Tensor) -> Tensor:
        """Sums `[size, ...]` over the ranks and returns this rank's entry, `[...]`."""
        return self.start_reduce_scatter_parts(parts)()

    def start_reduce_scatter_parts(self, parts: Tensor) -> Callable[[], Tensor]:
        """Starts :meth:`reduce_scatter_parts`; returns a function that waits for the result and returns it."""
        self._count("reduce_scatter", parts.numel())
        flat = parts.contiguous().view(-1)
        started = _OPS.reduce_scatter_tensor(flat, "sum", self.size, self._name)
        return lambda: _OPS.wait_tensor(started).view(parts.shape[1:])

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums a small tensor over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """Takes the elementwise maximum of a small tensor over the ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast(self, tensor: Tensor) -> None:
        """Copies the tensor of the group's first rank to the others, whatever their strides."""
        broadcast_values(tensor, self.group)

    def release(self) -> None:
        """Frees the receive buffers that are kept between reduce-scatters."""
        self._spare.clear()

    @contextlib.contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Counts the elements sent inside the block, by collective."""
        before = self.elements.copy()
        passed: Counter[str] = Counter()
        yield passed
        passed.update({name: count - before[name] for name, count in self.elements.items() if count != before[name]})

    def _in_pairs(self, buffer: Tensor) -> bool:
        """Whether to exchange segments between pairs of ranks, as is faster for CPU tensors on gloo."""
        return self._limit is not None and buffer.device.type == "cpu"

    def _announce(self, kind: str, buffer: Tensor) -> None:
        for listener in PAIRWISE_LISTENERS:
            listener(kind, self._name, buffer, 2 * (self.size - 1))

    def _count(self, name: str, elements: int) -> None:
        if not torch.compiler.is_compiling():
            self.elements[name] += elements

    def _receive_buffer(self, length: int, like: Tensor) -> Tensor:
        for number, spare in enumerate(self._spare):
            if spare.numel() >= length and spare.dtype == like.dtype and spare.device == like.device:
                return self._spare.pop(number)
        self._spare.clear()  # Buffers that are too short or of another dtype are not kept beside the new one.
        return like.new_empty(length)

    def _exchange_with(self, sent: Tensor, received: Tensor, step: int) -> list[Any]:
        """Starts to send a tensor to the rank `step` further, and to receive one from the rank `step` before."""
        return [
            dist.isend(sent, group=self.group, group_dst=(self.rank + step) % self.size),
            dist.irecv(received, group=self.group, group_src=(self.rank - step) % self.size),
        ]


def _real(tensor: Tensor) -> Tensor:
    """Returns a complex tensor as real numbers; torch's reduce-scatter (2.11 to 2.15) does not take complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def collectives_begun() -> list[int] | None:
    """Returns how many collectives this rank has begun in each process group; None if a backend does not count them.

    The counts are private in torch 2.11 to 2.15.
    """
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    try:
        return [backend._get_sequence_number_for_group() for backend in backends]
    except RuntimeError:
        return None


@torch.no_grad()
def broadcast_values(tensor: Tensor, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Copies the tensor of one of a group's ranks to the others, whatever the strides on each rank.

    torch's broadcast (2.11 to 2.15, on gloo) treats any tensor as contiguous memory from its first element on: a
    non-contiguous slice would get wrong values and overwrite its neighbours, an expanded tensor would write past its
    memory.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks. Where elements share memory, as after ``expand``, one
            of them is written for all.
        group: Process group; None for the default group.
        source: Number in the group of the rank whose values are copied.
    """
    if isinstance(tensor, FakeTensor):  # Without values. A rehearsal spent a fifth of its time on broadcasts.
        return
    if tensor.is_contiguous():
        dist.broadcast(tensor, group=group, group_src=source)
        return
    values = tensor.detach().contiguous()
    dist.broadcast(values, group=group, group_src=source)
    written = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            written, values = written.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    written.copy_(values)


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the backend of a group for a device's tensors, such as ``nccl``, also where it has several backends."""
    name = str(dist.get_backend(group))
    named = dict(part.split(":") for part in name.split(",")) if ":" in name else {}
    return named.get(device.type, name)


def is_sent_by_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Returns whether a device's tensors are copied to the CPU for a send: gloo (torch 2.15) sends CPU tensors only.

    The copy is slow and waits for the device; it is for several ranks that share one device, which NCCL refuses.
    """
    return device.type not in ("cpu", "meta") and backend_of(group, device) == "gloo"


class HostReceive:
    """Handle of a receive in flight whose tensor is then copied from the CPU to its device.

    Args:
        work: Handle of the receive.
        received: CPU tensor that receives the values.
        target: Tensor on the device.
    """

    def __init__(self, work: dist.Work, received: Tensor, target: Tensor) -> None:
        self._work, self._received, self._target = work, received, target

    def wait(self, *limit: timedelta) -> None:
        """Waits for the receive, and copies the values to the device."""
        self._work.wait(*limit)
        self._target.copy_(self._received)


def exchange_limit(group: dist.ProcessGroup | None) -> timedelta:
    """Returns the time limit of a gloo group's sends and receives between two ranks.

    Where a wait is not given this limit, torch (2.11 to 2.15) uses the one from when the ranks were connected, even if
    it has been set since.
    """
    of_cpu = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return of_cpu.options._timeout


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the sum of a tensor over ranks; backward sums the gradients, because each rank's loss depends on the sum.

    Args:
        values: Tensor of the same shape on all ranks.
        group: Process group of the ranks; None for one rank.
    """
    if group is None:
        return values

    def sum_values(given: Tensor) -> Tensor:
        total = given.clone()
        dist.all_reduce(total, group=group)
        return total

    return with_backward(values, sum_values, sum_values)


def with_backward(tensor: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a function of a tensor, with another function in place of its gradient; torch.compile traces both.

    Args:
        tensor: Tensor.
        run: Function of forward.
        back: Function of the result's gradient that gives the tensor's.
    """
    transformed: Tensor = _WithBackward.apply(tensor, run, back)
    return transformed


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None
