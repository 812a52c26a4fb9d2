"""Messages of a pipeline: in which groups they pass, and that every schedule's step comes to its end on NCCL.

The project's own exchanges run against links that note what is asked for. What is noted is then played on streams, each
in its order: one that computes and waits, and one for each group, which carries its own out one after the other; a
message passes when the sender's and the receiver's streams have both come to it.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlo_plugins.parallel.pipeline import exchange
from dlo_plugins.parallel.pipeline.exchange import Exchange, TensorLayout, Transport
from dlo_plugins.parallel.pipeline.pipeline_schedules import SCHEDULES, ActionKind, Placement, Schedule, make_schedule

_LAYOUT = TensorLayout.from_tensor(torch.zeros(2, requires_grad=True))


class NotingLink(exchange.Link):
    """Notes what a rank asks for: ``(what, group, peer, number)``."""

    least_ahead = 0

    def __init__(self, noted: list[Any], group: Any, peer: int, ahead: int) -> None:
        self.noted, self.group, self.peer = noted, group, peer
        self.ahead = max(ahead, self.least_ahead)

    def note(self, what: str) -> Any:
        self.noted.append((what, self.group, self.peer, len(self.noted)))
        return self.noted[-1]

    def send(self, tensor: torch.Tensor) -> Any:
        return self.note("send")

    def receive(self, tensor: torch.Tensor) -> Any:
        return self.note("receive")

    def wait(self, work: Any) -> None:
        self.noted.append(("wait", *work[1:]))

    def send_object(self, value: Any) -> list[Any]:
        return [(self.note("send"), torch.zeros(0)) for _ in range(2)]

    def receive_object(self) -> Any:
        for _ in range(2):  # Its length and its bytes, which the host reads.
            self.wait(self.note("receive"))
            self.noted.append(("host", None, None, len(self.noted)))
        return _LAYOUT, ()


def transport_of(rank: int, ranks: int, noted: list[Any], monkeypatch: pytest.MonkeyPatch) -> exchange.Transport:
    """Returns a rank's transport over NCCL, whose groups are numbers."""
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=None))
    group: Any = SimpleNamespace(_get_backend=lambda _: backend)
    made = iter(range(100))
    monkeypatch.setattr(exchange, "backend_of", lambda *_: "nccl")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda _: rank)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: list(range(ranks)))
    monkeypatch.setattr(exchange, "kept_group", lambda *_, **__: next(made))
    monkeypatch.setattr(exchange, "Link", lambda group, peer, *rest: NotingLink(noted, group, peer, rest[-1]))
    return exchange.Transport(group, torch.device("cpu"))


def asked(schedule: Schedule, rank: int, monkeypatch: pytest.MonkeyPatch, *, known: bool) -> list[Any]:
    """Returns what a rank asks of its links in a step, and when it waits for what."""
    place, noted = schedule.placement, []
    made = transport_of(rank, place.ranks, noted, monkeypatch)
    exchange = Exchange(made, place, torch.device("cpu"))
    if known:
        for stage in range(place.stages):
            exchange.set_layout(stage, 0, torch.zeros(2, requires_grad=True), ())
    tensor = torch.zeros(2, requires_grad=True)
    # Without flushes, three steps that hand backwards to the next one, and what is left after them.
    steps = [schedule] if schedule.flushes else [*[schedule] * 3, schedule.drain()]
    for step, running in enumerate(steps):
        first = step * schedule.micro_batches
        exchange.start(running, [0] * running.micro_batches, first)
        for action in running.orders[rank]:
            stage, number = action.stage, first + action.micro_batch
            if number < 0:
                continue
            if action.kind is ActionKind.FORWARD:
                if stage:
                    exchange.receive_hidden(stage, number)
                if stage + 1 < place.stages:
                    exchange.send_hidden(stage + 1, number, tensor, ())
            elif action.is_backward:
                if stage + 1 < place.stages:
                    exchange.receive_gradient(stage, number)
                if stage:
                    exchange.send_gradient(stage - 1, number, tensor.detach())
        exchange.finish()
    return noted


def stuck(programs: list[list[Any]]) -> list[tuple[int, Any]]:
    """Plays what the ranks have asked for; returns the ranks that do not come to the end, and at what they stand."""
    hosts = [deque(program) for program in programs]
    computing: list[deque[Any]] = [deque() for _ in programs]
    groups: list[dict[Any, deque[Any]]] = [{} for _ in programs]
    passed: set[tuple[int, int]] = set()
    reached: set[tuple[int, int]] = set()

    def advance(rank: int) -> bool:
        """Lets a rank's host and its computing stream go on as far as they can."""
        moved, host, stream = False, hosts[rank], computing[rank]
        while True:
            if stream and (stream[0][0] != "wait" or (rank, stream[0][3]) in passed):
                op = stream.popleft()
                reached.add((rank, op[3]))
            elif host and not (host[0][0] == "host" and stream):
                op = host.popleft()
                if op[0] != "host":
                    stream.append(op)  # A message begins once what was computed before it is there.
                if op[0] in ("send", "receive"):
                    groups[rank].setdefault(op[1], deque()).append(op)
            else:
                return moved
            moved = True

    def pass_messages() -> bool:
        for rank, queues in enumerate(groups):
            for group, queue in queues.items():
                if not queue or queue[0][0] != "send" or (rank, queue[0][3]) not in reached:
                    continue
                peer = queue[0][2]
                other = groups[peer].get(group)
                if not other or other[0][:3] != ("receive", group, rank) or (peer, other[0][3]) not in reached:
                    continue
                passed.update({(rank, queue.popleft()[3]), (peer, other.popleft()[3])})
                return True
        return False

    while any(advance(rank) for rank in range(len(programs))) or pass_messages():
        pass
    return [(rank, (*computing[rank], *host)[0]) for rank, host in enumerate(hosts) if host or computing[rank]]


@pytest.mark.parametrize("known", [False, True], ids=["first step", "later steps"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", list(SCHEDULES.loaded()))
def test_every_schedule_comes_to_its_end(name: str, ranks: int, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for micro_batches in (2 * ranks, 4 * ranks):
        schedule = make_schedule(name, ranks, micro_batches)
        programs = [asked(schedule, rank, monkeypatch, known=known) for rank in range(ranks)]
        assert sum(op[0] == "send" for program in programs for op in program) >= 2 * micro_batches * (ranks - 1)
        assert stuck(programs) == []


# --- in which groups hidden states and gradients pass ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device", "apart", "limit"),
    [
        ("nccl", "cuda", True, None),
        ("gloo", "cpu", False, timedelta(seconds=7)),
        # With offload to CPU memory there are both.
        ("cpu:gloo,cuda:nccl", "cuda", True, None),
        ("cpu:gloo,cuda:nccl", "cpu", False, timedelta(seconds=7)),
    ],
)
def test_on_nccl_what_comes_and_goes_to_each_neighbour_passes_in_a_group_of_its_own(
    name: str, device: str, apart: bool, limit: timedelta | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))
    group: Any = SimpleNamespace(_get_backend=lambda _: backend)
    monkeypatch.setattr(dist, "get_backend", lambda _: name)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2])
    monkeypatch.setattr(exchange, "kept_group", lambda *_, **__: object())
    transport = Transport(group, torch.device(device))
    ways = [transport.link(peer, incoming=incoming) for peer in (0, 2) for incoming in (False, True)]
    assert len({id(way.group) for way in ways}) == (4 if apart else 1)
    assert {way._limit for way in ways} == {limit}
    assert {way.ahead for way in ways} == {0 if apart else 2}


class Met(Transport):
    """Notes whom it would talk to."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device, self._is_fake = rank, torch.device("cpu"), False
        self.talks: list[tuple[int, int]] = []

    def link(self, peer: int, *, incoming: bool) -> Any:
        way = (peer, self.rank) if incoming else (self.rank, peer)
        self.talks.append(way)
        return SimpleNamespace(send=int, receive=int, wait=int)


def test_links_are_made_each_way_and_in_one_order_on_all_ranks() -> None:
    for ranks, stages_per_rank, shape in ((2, 1, "loop"), (4, 1, "loop"), (4, 2, "loop"), (4, 2, "v")):
        pairs = [*Placement(ranks, stages_per_rank, shape).neighbours(), (ranks - 1, 0)]  # type: ignore[arg-type]
        met = [Met(rank) for rank in range(ranks)]
        for transport in met:
            transport.connect(pairs)
        order = [
            way for one, other in sorted({(min(p), max(p)) for p in pairs}) for way in ((one, other), (other, one))
        ]
        for rank, transport in enumerate(met):
            assert transport.talks == [way for way in order if rank in way]
