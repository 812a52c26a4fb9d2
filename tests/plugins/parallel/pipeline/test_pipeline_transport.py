"""In which groups hidden states and gradients pass, by what carries the device's tensors."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlo_plugins.parallel.pipeline.exchange import Transport
from dlo_plugins.parallel.pipeline.pipeline_schedules import Placement


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
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
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
