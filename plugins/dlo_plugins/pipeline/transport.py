"""Hidden states and their gradients from rank to rank.

What a rank sends another forms one stream, in the order of the sender's schedule, which the receiver knows.
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

#: Receives that are posted before they are waited for, for each sender.
_AHEAD = 2


class Link:
    """One direction between two ranks.

    Args:
        group: in which its messages pass.
        peer: the other's number in it.
        device: of what passes.
        limit: how long a message may take; None leaves that to the group.
        by_host: Whether messages are copied to the CPU to be sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        limit: timedelta | None,
        by_host: bool = False,
    ) -> None:
        self.group, self.peer, self.device, self._limit, self._by_host = group, peer, device, limit, by_host

    def send(self, tensor: Tensor) -> dist.Work:
        """Starts to send a contiguous tensor."""
        work = dist.isend(tensor.cpu() if self._by_host else tensor, group=self.group, group_dst=self.peer)
        assert work is not None
        return work

    def receive(self, tensor: Tensor) -> dist.Work | HostReceive:
        """Starts to receive into a contiguous tensor; to be waited for by :meth:`wait`."""
        into = torch.empty_like(tensor, device="cpu") if self._by_host else tensor
        work = dist.irecv(into, group=self.group, group_src=self.peer)
        assert work is not None
        return HostReceive(work, into, tensor) if self._by_host else work

    def wait(self, work: dist.Work | HostReceive) -> None:
        """Waits until something has passed; on an accelerator the current stream does."""
        if self._limit is None:
            work.wait()
        else:
            work.wait(self._limit)

    def send_object(self, value: Any) -> list[tuple[dist.Work, Tensor]]:
        """Starts to send anything that can be pickled."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        length = torch.tensor([data.numel()], device=self.device)
        return [(self.send(length), length), (self.send(data), data)]

    def receive_object(self) -> Any:
        """Waits for what :meth:`send_object` has sent."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.wait(self.receive(length))
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.wait(self.receive(data))
        return pickle.loads(data.cpu().numpy().tobytes())


class Transport:
    """What a rank can send to and receive from the other ranks of its pipeline.

    What passes in one NCCL group passes one after the other, whoever the peer, where the group was connected at its
    making, as Lightning has it (torch 2.11 to 2.15): a send would wait for receives that were posted ahead from another
    rank, and that one's sends for this rank's. On NCCL, messages to higher and to lower ranks therefore pass in groups
    of their own, and those of a rank's two neighbours in different ones (:func:`crossing`), so that a rank meets one
    other in a group. All ranks of the pipeline make these groups together; they must be members of equally many
    groups, as the ranks of a mesh are, since torch names such groups by that number. gloo carries all messages out side
    by side.

    Args:
        group: the pipeline's ranks.
        device: of what passes.
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

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Sends a number each way between pairs of ranks, so that none of them has to be connected in a step.

        NCCL connects two ranks when they first send each other anything, which takes seconds and waits for both; what
        is wrong with the network shows here, before data are read. All ranks of the pipeline call it.

        Args:
            pairs: of the ranks' numbers, the same on all of them; each rank takes its own in one order of all, so that
                no two wait for each other.
        """
        for pair in sorted({tuple(sorted(pair)) for pair in pairs}):
            if self.rank not in pair or self._is_fake:
                continue
            peer = pair[1] if self.rank == pair[0] else pair[0]
            for incoming in (self.rank == pair[1], self.rank == pair[0]):
                link, number = self.link(peer, incoming=incoming), torch.zeros(1, device=self.device)
                link.wait(link.receive(number) if incoming else link.send(number))

    def link(self, peer: int, *, incoming: bool) -> Link:
        """Returns the way from or to another rank of the pipeline."""
        group = self.group
        if self._apart:
            upwards = peer < self.rank if incoming else peer > self.rank
            group = self._apart[2 * crossing(self.rank, peer) + int(upwards)]
        return Link(group, peer, self.device, self._limit, self._by_host)


def crossing(rank: int, peer: int) -> int:
    """Returns which of three groups two ranks meet in, so that in none a rank meets both of its neighbours in the ring.

    Those whose numbers follow each other meet in the first and the second by turns; the last and the first rank, and
    ranks further apart that share a tied weight, in the third.
    """
    return min(rank, peer) % 2 if abs(rank - peer) == 1 else 2


class Sends:
    """What has been sent in a step and may not have arrived.

    gloo (torch 2.11 to 2.15) does not tell whether something has arrived until one waits for it. What a peer has done
    since does: it computes with what it gets before it goes on to what its later messages hold.

    Attributes:
        most: messages that were under way at one time, at most.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, deque[tuple[int, Link, dist.Work, Tensor]]] = {}
        self.most = 0

    def add(self, peer: int, place: int, link: Link, works: Iterable[tuple[dist.Work, Tensor]]) -> None:
        """Keeps tensors until they have arrived.

        Args:
            peer: to whom they are sent.
            place: of what it does with them, in its order.
            link: to it.
            works: the sends, and the tensors.
        """
        queue = self._under_way.setdefault(peer, deque())
        queue.extend((place, link, work, tensor) for work, tensor in works)
        self.most = max(self.most, sum(map(len, self._under_way.values())))

    def arrived(self, peer: int, place: int) -> None:
        """Lets go of what a peer has used.

        Args:
            peer: from whom a message has come.
            place: of what has made that message, in its order.
        """
        queue = self._under_way.get(peer, deque())
        used = [item for item in queue if item[0] <= place]
        for _, link, work, _ in used:
            link.wait(work)
        self._under_way[peer] = deque(item for item in queue if item[0] > place)

    def finish(self) -> None:
        """Waits for all of it."""
        for queue in self._under_way.values():
            for _, link, work, _ in queue:
                link.wait(work)
        self._under_way.clear()


class Inbox:
    """What a rank receives from one other in a step, in the order in which that one sends it.

    Args:
        link: from the other rank.
        expected: what comes, in order.
        room: returns a flat tensor to receive an item into, None if its size is not known yet, or False if it does not
            come after all.
        header: called with an item whose size is not known, and what was sent ahead of it.
    """

    def __init__(
        self,
        link: Link,
        expected: Iterable[Any],
        room: Callable[[Any], Tensor | Literal[False] | None],
        header: Callable[[Any, Any], None],
    ) -> None:
        self._link, self._room, self._header = link, room, header
        self._expected = deque(expected)
        self._posted: dict[Any, tuple[dist.Work | HostReceive, Tensor]] = {}

    def take(self, item: Any) -> Tensor:
        """Returns an item once it has arrived; those that were sent before it are kept."""
        while item not in self._posted:
            assert self._expected, f"{item} is not sent"
            if not self._post():
                first = self._expected[0]
                self._header(first, self._link.receive_object())
        work, room = self._posted.pop(item)
        while len(self._posted) < _AHEAD and self._expected and self._post():
            pass
        self._link.wait(work)
        return room

    def _post(self) -> bool:
        """Posts the next receive, unless its size is not known yet."""
        room = self._room(self._expected[0])
        if room is None:
            return False
        item = self._expected.popleft()
        if room is not False:
            self._posted[item] = self._link.receive(room), room
        return True
