"""Point-to-point transport of hidden states and their gradients between ranks.

The messages from one rank to another are one stream, in the order of the sender's schedule, which the receiver knows.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.distributed import collectives
from dlo_framework.distributed.collectives import HostReceive, backend_of, exchange_limit

#: Number of receives that are posted in advance for each sender, but on NCCL.
_AHEAD = 2


class Link:
    """Link between two ranks in one direction.

    Args:
        group: Process group of the link's messages.
        peer: Other rank's number in the group.
        device: Device of the messages.
        limit: Timeout of a message; None uses the group's.
        by_host: Whether to copy messages to the CPU to send them.
        ahead: Number of receives to post in advance.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        limit: timedelta | None,
        by_host: bool = False,
        ahead: int = _AHEAD,
    ) -> None:
        self.group, self.peer, self.device, self._limit, self._by_host = group, peer, device, limit, by_host
        self.ahead = ahead

    def send(self, tensor: Tensor) -> dist.Work:
        """Starts to send a contiguous tensor."""
        work = dist.isend(tensor.cpu() if self._by_host else tensor, group=self.group, group_dst=self.peer)
        assert work is not None
        return work

    def receive(self, tensor: Tensor) -> dist.Work | HostReceive:
        """Starts to receive into a contiguous tensor; wait for it with :meth:`wait`."""
        into = torch.empty_like(tensor, device="cpu") if self._by_host else tensor
        work = dist.irecv(into, group=self.group, group_src=self.peer)
        assert work is not None
        return HostReceive(work, into, tensor) if self._by_host else work

    def wait(self, work: dist.Work | HostReceive) -> None:
        """Waits until a send or receive is complete; on an accelerator, the current stream waits."""
        if self._limit is None:
            work.wait()
        else:
            work.wait(self._limit)

    def send_object(self, value: Any) -> list[tuple[dist.Work, Tensor]]:
        """Starts to send an object that can be pickled."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        length = torch.tensor([data.numel()], device=self.device)
        return [(self.send(length), length), (self.send(data), data)]

    def receive_object(self) -> Any:
        """Waits for an object from :meth:`send_object`, and returns it."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.wait(self.receive(length))
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.wait(self.receive(data))
        return pickle.loads(data.cpu().numpy().tobytes())


class Transport:
    """Links from a rank to the other ranks of its pipeline.

    An NCCL group that was connected when it was made, as Lightning makes it, runs all its messages one after the other,
    whatever the peer (torch 2.11 to 2.15). A send would then wait for receives that were posted in advance from another
    rank, whose sends would wait for this rank's. So on NCCL, messages to higher and to lower ranks use separate groups,
    and a rank's two neighbours use different groups (:func:`group_index`): in each group a rank has a single peer. All
    ranks of the pipeline make these groups together. They must be members of equally many groups, as the ranks of a
    mesh are, since torch names such groups by that number. gloo runs all messages concurrently.

    On NCCL no receive is posted in advance: a posted one is a kernel that waits on the device. With two in advance,
    pipelines hung on an H200 (two ranks, torch 2.11, NCCL 2.28); with none, 1F1B trains as one process.

    Args:
        group: Process group of the pipeline's ranks.
        device: Device of the messages.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = dist.get_rank(group)
        backend = backend_of(group, device)
        self._apart: list[dist.ProcessGroup] = []
        if backend == "nccl":
            ranks = dist.get_process_group_ranks(group)
            limit = group._get_backend(device).options._timeout
            crossings = 1 if len(ranks) == 2 else 3
            made = [dist.new_group(ranks, timeout=limit, use_local_synchronization=True) for _ in range(2 * crossings)]
            self._apart = made  # type: ignore[assignment]
        self._limit = exchange_limit(group) if backend == "gloo" else None
        self._by_host = collectives.is_sent_by_host(group, device)
        self._is_fake = backend == "fake"
        self._ahead = 0 if backend == "nccl" else _AHEAD

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Connects pairs of ranks in advance: each pair sends a number in both directions.

        NCCL connects two ranks at their first message, which takes seconds and blocks both. A fault of the network
        shows here, before data are read. All ranks of the pipeline call it.

        Args:
            pairs: Pairs of rank numbers, the same on all ranks. All ranks use the same order of pairs, so that no two
                wait for each other.
        """
        for pair in sorted({tuple(sorted(pair)) for pair in pairs}):
            if self.rank not in pair or self._is_fake:
                continue
            peer = pair[1] if self.rank == pair[0] else pair[0]
            for incoming in (self.rank == pair[1], self.rank == pair[0]):
                link, number = self.link(peer, incoming=incoming), torch.zeros(1, device=self.device)
                link.wait(link.receive(number) if incoming else link.send(number))

    def link(self, peer: int, *, incoming: bool) -> Link:
        """Returns the link from or to another rank of the pipeline."""
        group = self.group
        if self._apart:
            upwards = peer < self.rank if incoming else peer > self.rank
            group = self._apart[2 * group_index(self.rank, peer) + int(upwards)]
        return Link(group, peer, self.device, self._limit, self._by_host, self._ahead)


def group_index(rank: int, peer: int) -> int:
    """Returns the number of the group, out of three, that two ranks use.

    In no group does a rank have both of its neighbours in the ring. Consecutive ranks alternate between the first and
    the second group. The last and the first rank use the third, as do ranks further apart that share a tied weight.
    """
    return min(rank, peer) % 2 if abs(rank - peer) == 1 else 2


class SendQueue:
    """Sent tensors of a step that may not have arrived yet.

    gloo (torch 2.11 to 2.15) does not report the arrival of a message unless one waits for it. The peer's later
    messages show it: the peer has used what it received before it sent them.

    Attributes:
        most: Largest number of messages in flight at one time.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, deque[tuple[float, Link, dist.Work, Tensor]]] = {}
        self.most = 0

    def add(self, peer: int, place: float, link: Link, works: Iterable[tuple[dist.Work, Tensor]]) -> None:
        """Keeps tensors until they have arrived.

        Args:
            peer: Rank that receives them.
            place: Position in the peer's order of the action that uses them.
            link: Link to the peer.
            works: Sends, each with its tensor.
        """
        queue = self._under_way.setdefault(peer, deque())
        queue.extend((place, link, work, tensor) for work, tensor in works)
        self.most = max(self.most, sum(map(len, self._under_way.values())))

    def release(self, peer: int, place: float) -> None:
        """Releases the tensors that a peer has used.

        Args:
            peer: Rank that has sent a message.
            place: Position in the peer's order of the action that has sent the message.
        """
        queue = self._under_way.get(peer, deque())
        used = [item for item in queue if item[0] <= place]
        for _, link, work, _ in used:
            link.wait(work)
        self._under_way[peer] = deque(item for item in queue if item[0] > place)

    def finish(self) -> None:
        """Waits for all sends."""
        for queue in self._under_way.values():
            for _, link, work, _ in queue:
                link.wait(work)
        self._under_way.clear()


class ReceiveQueue:
    """Receives of a step from one other rank, in the order in which that rank sends.

    Args:
        link: Link from the other rank.
        expected: Items that the other rank sends, in order.
        buffer: Function that returns a flat tensor to receive an item into, None if its size is not known yet, or
            False if the item is not sent.
        header: Callback with an item whose size was not known, and the header that was sent before it.
    """

    def __init__(
        self,
        link: Link,
        expected: Iterable[Any],
        buffer: Callable[[Any], Tensor | Literal[False] | None],
        header: Callable[[Any, Any], None],
    ) -> None:
        self._link, self._buffer, self._header = link, buffer, header
        self._expected = deque(expected)
        self._posted: dict[Any, tuple[dist.Work | HostReceive, Tensor]] = {}

    def expect(self, items: Iterable[Any]) -> None:
        """Adds items that the other rank sends after those that are expected already."""
        self._expected.extend(items)

    def receive(self, item: Any) -> Tensor:
        """Returns an item once it has arrived, and keeps those that were sent before it."""
        while item not in self._posted:
            assert self._expected, f"{item} is not sent"
            if not self._post():
                first = self._expected[0]
                self._header(first, self._link.receive_object())
        work, buffer = self._posted.pop(item)
        while len(self._posted) < self._link.ahead and self._expected and self._post():
            pass
        self._link.wait(work)
        return buffer

    def _post(self) -> bool:
        """Posts the next receive, unless its size is not known yet."""
        buffer = self._buffer(self._expected[0])
        if buffer is None:
            return False
        item = self._expected.popleft()
        if buffer is not False:
            self._posted[item] = self._link.receive(buffer), buffer
        return True
