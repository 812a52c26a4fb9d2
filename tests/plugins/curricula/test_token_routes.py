"""Routes of tokens between ranks that share sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dlo_plugins.context.sequence_layout import shard_sequence
from dlo_plugins.curricula.token_draws import draw_tokens
from dlo_plugins.curricula.token_routes import TokenLayout, find_routes


def shards(values: np.ndarray, layout: TokenLayout) -> list[np.ndarray]:
    """Values of the ranks' positions, -1 for the padding of slices."""
    found = []
    for rank in range(layout.cp):
        own = shard_sequence(torch.from_numpy(values)[None], rank, layout.cp)[0].numpy() if layout.cp > 1 else values
        padded = np.concatenate([own, np.full(layout.size * layout.tp - len(own), -1)])
        found += np.split(padded, layout.tp)
    return found


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (1, 2), (4, 1), (2, 3), (1, 4)])
@pytest.mark.parametrize("count", [1, 5, 12, 23])
def test_tokens_reach_their_places(cp: int, tp: int, count: int) -> None:
    index = draw_tokens(23, count, 0, step=3, block=1, seed=0)
    old = TokenLayout(24, cp, tp)
    new = TokenLayout(-(-count // (2 * cp)) * 2 * cp if cp > 1 else count, cp, tp)
    before = shards(np.arange(24), old)
    chosen = np.concatenate([index, np.full(new.length - count, -1)])
    expected = shards(chosen, new)
    routes = [find_routes(index, old, new, rank, torch.device("cpu")) for rank in range(cp * tp)]
    sent = [
        np.split(own[route.sent.numpy()], np.cumsum(route.sent_counts)[:-1])
        for own, route in zip(before, routes, strict=True)
    ]
    for rank, route in enumerate(routes):
        got = np.concatenate([parts[rank] for parts in sent])
        assert [len(parts[rank]) for parts in sent] == route.received_counts
        found = np.full(route.size, -1)
        found[route.received.numpy()] = got
        assert found.tolist() == expected[rank].tolist()
    assert max(route.size for route in routes) == min(route.size for route in routes)


def test_positions_of_a_rank_are_its_chunks() -> None:
    assert TokenLayout(8, 2).places_of(0).tolist() == [0, 1, 6, 7]
    assert TokenLayout(8, 2).places_of(1).tolist() == [2, 3, 4, 5]
    assert TokenLayout(3).places_of(0).tolist() == [0, 1, 2]
