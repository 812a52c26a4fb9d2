"""The arithmetic of who owns what, and who may read it."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import LambdaCallback, ModelPruning
from lightning.pytorch.demos.boring_classes import BoringModel

from dlo_framework.watch.state_bytes import paper_bytes
from dlo_plugins.parallel.flat_slices import FlatPartition
from dlo_plugins.parallel.zero.strategy import _may_read_weights

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=12)
RANKS = st.integers(1, 9)
ALIGN = st.sampled_from([1, 2, 4, 8])


@given(SIZES, RANKS, ALIGN)
def test_every_element_has_one_owner(numels: list[int], ranks: int, align: int) -> None:
    partition = FlatPartition(tuple(numels), ranks, align)
    owned = [
        (piece.parameter, element)
        for rank in range(ranks)
        for piece in partition.pieces(rank)
        for element in range(piece.start, piece.start + piece.length)
    ]
    assert owned == [(number, element) for number, count in enumerate(numels) for element in range(count)]


def test_the_paper_s_own_figures() -> None:
    """7.5 billion parameters on 64 ranks, half precision with a master copy: its figure 1."""
    for stage, gigabytes in ((0, 120), (1, 31.4), (2, 16.6), (3, 1.9)):
        # 2 psi parameters, 2 psi gradients, 12 psi optimizer state: six state tensors of two bytes.
        found = paper_bytes(7_500_000_000, 64, stage, element=2, states=6)
        assert (found.parameters + found.gradients + found.optimizer) / 1e9 == pytest.approx(gigabytes, rel=0.02)


class Ends(BoringModel):
    def on_train_end(self) -> None:
        """May read weights."""


class Transfers(BoringModel):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("module", "callbacks", "reads"),
    [
        (BoringModel(), [], False),
        (BoringModel(), [LambdaCallback(on_train_batch_end=lambda *_: None)], True),
        (BoringModel(), [ModelPruning("l1_unstructured", amount=0.5)], True),
        (Ends(), [], True),
        (Transfers(), [], True),
    ],
)
def test_who_may_read_weights_between_a_step_and_the_next_forward(
    module: Any, callbacks: list[Any], reads: bool
) -> None:
    assert _may_read_weights(SimpleNamespace(callbacks=callbacks), module) is reads  # type: ignore[arg-type]
