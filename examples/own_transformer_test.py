"""Tests that the transformer on several ranks equals one process."""

from functools import partial

from own_transformer import Source, Writer

from dlo_framework.testing import Case, assert_parity
from dlo_plugins.parallel.mesh.strategy import MeshStrategy


def build() -> tuple[Writer, Source]:
    """Returns a new model and its data, for each rank and for the single process."""
    return Writer(width=32, length=32), Source(length=32, batch_size=8)


def on_mesh(**axes: int | bool) -> Case:
    """Returns the case of a mesh."""
    return Case(partial(MeshStrategy, dp_shard=-1, **axes), name=str(axes))


def test_one_axis() -> None:
    """Tests pipeline, tensor, context and data parallelism, each on two ranks."""
    axes = [{"pp": 2, "micro_batches": 4}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {}]
    assert_parity(build, [on_mesh(**one) for one in axes], world_size=2, steps=3)


def test_two_axes() -> None:
    """Tests pairs of the four, on four ranks."""
    assert_parity(build, [on_mesh(pp=2, tp=2, micro_batches=4), on_mesh(cp=2)], world_size=4, steps=3)


def test_four_axes() -> None:
    """Tests all of them together, on sixteen ranks."""
    assert_parity(build, [on_mesh(pp=2, cp=2, tp=2, micro_batches=4)], world_size=16, steps=3)
