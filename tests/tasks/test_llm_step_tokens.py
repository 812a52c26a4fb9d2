"""The sampler of texts: which batches come, and how many targets their step has."""

from __future__ import annotations

import numpy as np
import pytest

from dlo_framework.data import Position, Window
from support.texts import sampler


@pytest.mark.parametrize("lengths", [None, np.arange(40) % 7 + 1])
def test_ranks_share_out_the_batches_of_one_process(lengths):
    one = list(sampler(lengths=lengths, accumulate=2))
    ranks = [list(sampler(4, rank, lengths=lengths, accumulate=2)) for rank in range(4)]
    for whole, *shares in zip(one, *ranks, strict=True):
        assert [draw.index for share in shares for draw in share] == [draw.index for draw in whole]
        assert {share.tokens_in_step for share in shares} == {whole.tokens_in_step}
        assert {share.length for share in shares} == {whole.length}
        if lengths is not None:
            assert whole.length == max(lengths[draw.index] for draw in whole)


def test_steps_that_are_planned_count_their_own_batches():
    planned = sampler(window_at=lambda at: Window(4, 1 + (at.samples >= 20)), accumulate=1)
    batches = list(planned)
    counts = [sum((draw.index + 1) ** 2 for draw in batch) for batch in batches]
    expected = [*counts[:5], *[sum(counts[5:7])] * 2, *[sum(counts[7:9])] * 2, counts[9]]
    assert [batch.tokens_in_step for batch in batches] == expected


def test_steps_whose_length_is_decided_later_are_not_guessed_at():
    unplanned = sampler(window_at=lambda at: Window(4, 1), accumulate=2)
    assert {batch.tokens_in_step for batch in unplanned} == {None}
    assert isinstance(unplanned.planned()[0].start, int)
    assert Position(0, 0, 40).epochs == 0
