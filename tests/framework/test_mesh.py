"""The mesh: the coordinates of each rank, and the sizes that fit a world size."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlo_framework.errors import DloError
from dlo_framework.mesh import AXES, MeshSpec

SIZES = st.tuples(*[st.integers(1, 4)] * len(AXES))


@given(SIZES, st.sampled_from(AXES))
def test_the_open_axis_is_filled_in(sizes: tuple[int, ...], axis: str) -> None:
    spec = MeshSpec(*sizes)
    assert MeshSpec(**{**spec.sizes, axis: -1}).resolve(spec.world_size) == spec.resolve(spec.world_size) == spec


@given(SIZES)
def test_each_place_has_one_rank_and_the_inner_axes_are_next_to_each_other(sizes: tuple[int, ...]) -> None:
    spec = MeshSpec(*sizes)
    places = [spec.coordinates(rank) for rank in range(spec.world_size)]
    assert len(set(places)) == spec.world_size
    assert places == sorted(places)
    assert [spec.rank(place) for place in places] == list(range(spec.world_size))
    by_share: dict[int, int] = {}
    for rank, place in enumerate(places):
        share = spec.data_rank(rank)
        assert share == place.dp_replicate * spec.dp_shard + place.dp_shard
        by_share[share] = by_share.get(share, 0) + 1
    assert by_share == dict.fromkeys(range(spec.data_size), spec.pp * spec.cp * spec.tp)


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"pp": 2, "tp": 3}, 8, "world size must be divisible by pp 2 x tp 3, got 8; use tp=2 or run 6 or 12 p"),
        ({"pp": 2, "dp_shard": 2}, 8, "dp_shard 2 = 4, got 8; set an axis to -1, or use pp=4 or dp_shard=4 or run 4"),
        ({"tp": 0}, 8, "tp must be at least 1, or -1 for all remaining ranks, got 0"),
        ({"pp": -1}, 8, "at most one axis must be -1, got pp and dp_shard; set pp to 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(sizes: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(DloError, match=re.escape(message)):
        MeshSpec(**sizes).resolve(world)
