"""Which positions a rank holds, and batches that are made to fit."""

import pytest
import torch

from dlo_framework.errors import DloError
from dlo_plugins.parallel.context.sequence_layout import (
    Visibility,
    chunks_of,
    find_documents,
    pad_batch,
    shard_sequence,
)


def test_a_rank_holds_a_chunk_of_the_head_and_one_of_the_tail() -> None:
    assert [chunks_of(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert shard_sequence(torch.arange(8)[None], 1, 2).tolist() == [[2, 3, 4, 5]]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_ranks_have_the_same_work(ranks: int) -> None:
    documents = find_documents(torch.arange(16 * ranks)[None], None, 2 * ranks)
    cost = {Visibility.NOTHING: 0.0, Visibility.CAUSAL: 0.5, Visibility.ALL: 1.0}
    work = [
        sum(cost[documents.seen(query, key)] for query in chunks_of(rank, ranks) for key in range(2 * ranks))
        for rank in range(ranks)
    ]
    assert work == [2.0 * ranks] * ranks  # half of (2 ranks)^2 pairs, shared


def test_a_length_that_does_not_fit_is_padded_with_what_has_no_target() -> None:
    batch = {
        "input_ids": torch.full((2, 5), 7),
        "labels": torch.full((2, 5), 7),
        "position_ids": torch.arange(5).expand(2, 5),
        "attention_mask": torch.ones(2, 5, dtype=torch.long),
        "tokens_in_step": torch.tensor(10),
    }
    found = pad_batch(batch, 2)
    assert found["labels"][0].tolist() == [7] * 5 + [-100] * 3
    assert found["position_ids"][1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert found["attention_mask"][1].tolist() == [1] * 5 + [0] * 3
    assert found["input_ids"].shape == (2, 8)
    assert found["tokens_in_step"] is batch["tokens_in_step"]
    assert batch["labels"].shape == (2, 5)


@pytest.mark.parametrize("batch", [[torch.zeros(2, 4)], {"pixels": torch.zeros(2, 4)}, {"input_ids": torch.zeros(4)}])
def test_other_batches_are_refused(batch: object) -> None:
    with pytest.raises(DloError, match=r"a batch must be a dict with `input_ids` \[B, L\]"):
        pad_batch(batch, 2)
