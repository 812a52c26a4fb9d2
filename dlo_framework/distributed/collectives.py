"""The two collectives that sharding is made of, each way round: reduce-scatter and all-gather of a flat buffer.

For tensors of an accelerator they are torch's own. For those of a CPU, on gloo (torch 2.15), torch's take 1.5 to 2.2
times as long as an all-reduce of the same buffer, which does the work of both; exchanging the segments between pairs of
ranks takes a half and a third of theirs (``benchmarks/collectives.py``), so here each rank sends each other rank its
segment and adds up what it gets.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

#: Buffers kept at most for what a reduce-scatter receives; as many as are under way at once.
_SPARES = 2
#: The collectives that make new tensors: torch.compile traces them, and they are defined for meta tensors.
_OPS = torch.ops._c10d_functional


class Pending:
    """A collective under way.

    Args:
        works: what torch gave for its parts.
        finish: called once they are done; what it returns is the result.
        limit: how long each part may take; None leaves that to the group.
    """

    def __init__(self, works: list[dist.Work], finish: Callable[[], Tensor], limit: timedelta | None = None) -> None:
        self._works, self._limit = works, limit
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Waits (on an accelerator: its current stream does) and returns the result."""
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
    """The ranks that share a model's state, and what passes between them.

    Attributes:
        group: their process group; None is the default one.
        rank: this rank's number in it.
        size: how many there are.
        elements: elements passed so far, by collective; a buffer of n elements counts n, as in the ZeRO paper.
        skips_alone: whether a group of one rank does without collectives. Switched off, they run for real there: so one
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
        """Returns a rank's segment of a flat buffer whose length the ranks divide; this rank's by default."""
        length = buffer.numel() // self.size
        start = (self.rank if rank is None else rank) * length
        return buffer[start : start + length]

    def reduce_scatter(self, buffer: Tensor, *, average: bool = False) -> Pending:
        """Sums a flat buffer over the ranks; the result is this rank's segment of the sum, which may lie in it.

        Args:
            buffer: 1-D, its length divisible by the number of ranks. It is overwritten.
            average: Whether the result is the mean over the ranks.

        On gloo, memory for what comes from the others is kept for the next one, until :meth:`release`: new memory
        takes longer to be mapped than the sum takes.
        """
        self.elements["reduce_scatter"] += buffer.numel()
        own = self.segment(buffer)
        if self.size == 1 and self.skips_alone:
            return Pending([], lambda: own)
        in_pairs = self._in_pairs(buffer)
        op = dist.ReduceOp.AVG if average and self._averages and not in_pairs else dist.ReduceOp.SUM
        average = average and op == dist.ReduceOp.SUM  # What is left to be done.
        if average and buffer.dtype == torch.float16:  # A sum of several may be too large for it.
            buffer.div_(self.size)
            average = False
        if not in_pairs:
            result = torch.empty_like(own)
            work = dist.reduce_scatter_tensor(_real(result), _real(buffer), op=op, group=self.group, async_op=True)
            assert work is not None
            return Pending([work], lambda: result.div_(self.size) if average else result)
        memory = self._take((self.size - 1) * own.numel(), buffer)
        received = memory[: (self.size - 1) * own.numel()].view(self.size - 1, own.numel())
        works: list[dist.Work] = []
        for step, row in enumerate(received, start=1):
            works.append(self._send(self.segment(buffer, (self.rank + step) % self.size), step))
            works.append(self._receive(row, step))

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
        """Fills a flat buffer: each rank brings its own segment of it; the result is the buffer."""
        self.elements["all_gather"] += buffer.numel()
        own = self.segment(buffer)
        if self.size == 1 and self.skips_alone:
            return Pending([], lambda: buffer)
        if not self._in_pairs(buffer):
            work = dist.all_gather_into_tensor(buffer, own, group=self.group, async_op=True)
            assert work is not None
            return Pending([work], lambda: buffer)
        works: list[dist.Work] = []
        for step in range(1, self.size):
            works.append(self._send(own, step))
            works.append(self._receive(self.segment(buffer, (self.rank - step) % self.size), step))
        return Pending(works, lambda: buffer, self._limit)

    def exchange(self, sent: list[Tensor], received: list[int]) -> list[Tensor]:
        """Sends each rank a flat tensor, of any length, and returns what each sent to this one.

        Args:
            sent: one 1-D tensor a rank, in the order of ranks, all of one dtype.
            received: the length of what each rank sends to this one, in the same order.
        """
        lengths = [tensor.numel() for tensor in sent]
        self.elements["exchange"] += sum(lengths)
        if self.size == 1 and self.skips_alone:
            return sent
        result = sent[0].new_empty(sum(received))
        dist.all_to_all_single(result, torch.cat(sent), received, lengths, group=self.group)
        return list(result.split(received))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks, in memory of its own.

        This and the next three are defined for meta tensors, and torch.compile traces them without counting.
        """
        return self.start_all_reduce(tensor)()

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts to sum a tensor over the ranks; returns what waits for the sum, and returns it."""
        self._count("all_reduce", tensor.numel())
        started = _OPS.all_reduce(tensor.contiguous(), "sum", self._name)
        return lambda: _OPS.wait_tensor(started)

    def all_gather_parts(self, part: Tensor) -> Tensor:
        """Returns what each rank brings, `[size, *part.shape]`; the parts have one shape."""
        self._count("all_gather", part.numel() * self.size)
        flat = part.contiguous().view(-1)
        return _OPS.wait_tensor(_OPS.all_gather_into_tensor(flat, self.size, self._name)).view(self.size, *part.shape)

    def reduce_scatter_parts(self, parts: Tensor) -> Tensor:
        """Sums `[size, ...]` over the ranks and returns this rank's `[...]` of it."""
        self._count("reduce_scatter", parts.numel())
        flat = parts.contiguous().view(-1)
        return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(flat, "sum", self.size, self._name)).view(parts.shape[1:])

    def sum(self, tensor: Tensor) -> Tensor:
        """Adds a small tensor up over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """Takes the elementwise maximum of a small tensor over the ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast(self, tensor: Tensor) -> None:
        """Copies the group's first rank's tensor to the others, however theirs lie in memory."""
        broadcast_values(tensor, self.group)

    def release(self) -> None:
        """Gives back the memory that is kept from one reduce-scatter to the next."""
        self._spare.clear()

    @contextlib.contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Counts the elements that pass inside the block, by collective."""
        before = self.elements.copy()
        passed: Counter[str] = Counter()
        yield passed
        passed.update({name: count - before[name] for name, count in self.elements.items() if count != before[name]})

    def _in_pairs(self, buffer: Tensor) -> bool:
        """Whether to exchange segments between pairs of ranks: gloo sends tensors of the CPU alone."""
        return self._limit is not None and buffer.device.type == "cpu"

    def _count(self, name: str, elements: int) -> None:
        if not torch.compiler.is_compiling():
            self.elements[name] += elements

    def _take(self, length: int, like: Tensor) -> Tensor:
        for number, spare in enumerate(self._spare):
            if spare.numel() >= length and spare.dtype == like.dtype and spare.device == like.device:
                return self._spare.pop(number)
        self._spare.clear()  # Too short, or of another dtype: rather none than some of each.
        return like.new_empty(length)

    def _send(self, tensor: Tensor, step: int) -> dist.Work:
        work = dist.isend(tensor, group=self.group, group_dst=(self.rank + step) % self.size)
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, step: int) -> dist.Work:
        work = dist.irecv(tensor, group=self.group, group_src=(self.rank - step) % self.size)
        assert work is not None
        return work


def _real(tensor: Tensor) -> Tensor:
    """Returns a tensor as real numbers: torch's reduce-scatter (2.11 to 2.15), unlike its others, knows no complex."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def broadcast_values(tensor: Tensor, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Copies the values of one of a group's ranks into the others' tensors, however each lies in memory.

    torch's own (2.11 to 2.15, on gloo) takes any tensor for a run of memory from its first element on: a slice gets
    values of others' and writes over its neighbours, an expanded one writes behind its memory.

    Args:
        tensor: of the same shape and dtype on all ranks. Where its elements share memory, as ``expand`` has them, one
            of them is written for all.
        group: the ranks; None is all of them.
        source: whose values, by its number in the group.
    """
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
    """Returns what carries a device's tensors in a group, such as ``nccl``, also where it has several backends."""
    name = str(dist.get_backend(group))
    named = dict(part.split(":") for part in name.split(",")) if ":" in name else {}
    return named.get(device.type, name)


def is_sent_by_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether a device's tensors are copied to the CPU to be sent to a single rank: gloo (torch 2.15) sends no others.

    That is slow and waits for the device; it serves several ranks that share one device, which NCCL refuses.
    """
    return device.type not in ("cpu", "meta") and backend_of(group, device) == "gloo"


class HostReceive:
    """A receive under way whose tensor is copied to its device when it has come.

    Args:
        work: the receive.
        received: on the CPU, into which it goes.
        target: the tensor on the device.
    """

    def __init__(self, work: dist.Work, received: Tensor, target: Tensor) -> None:
        self._work, self._received, self._target = work, received, target

    def wait(self, *limit: timedelta) -> None:
        """Waits for the other rank, and copies."""
        self._work.wait(*limit)
        self._target.copy_(self._received)


def exchange_limit(group: dist.ProcessGroup | None) -> timedelta:
    """Returns how long a gloo group's exchange between two ranks may take.

    Without being told, torch (2.11 to 2.15) lets it take as long as was said when the ranks were connected, whatever
    has been set since.
    """
    of_cpu = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return of_cpu.options._timeout
