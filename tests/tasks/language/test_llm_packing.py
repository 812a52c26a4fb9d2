"""Token windows: cutting and packing documents, the cache of their tokens, and what is counted of a batch."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_tasks.language import batches, families
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.packing import count_targets, cut_documents, pack_best_fit
from dlo_tasks.language.step_tokens import bucket_by_length
from dlo_tasks.language.token_cache import DamagedTokenCache, Document, TokenStore, verify_checksum, write_store
from support.token_batches import GROUPED, packed_rows
from support.waits import Waits


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best fit, decreasing, by its definition; returns the room left in each window."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


@st.composite
def lengths_and_capacity(draw):
    capacity = draw(st.integers(1, 50))
    return draw(st.lists(st.integers(1, capacity), max_size=120)), capacity


@given(lengths_and_capacity())
def test_packing_is_best_fit_decreasing(case):
    lengths, capacity = case
    packed = pack_best_fit(np.array(lengths, dtype=int), capacity)
    taken = np.zeros((packed.windows, capacity), int)
    for window, offset, length in zip(packed.window, packed.offset, lengths, strict=True):
        taken[window, offset : offset + length] += 1
    assert taken.max(initial=0) <= 1, "no two pieces overlap"
    assert (np.diff(taken, axis=1) <= 0).all(), "each window is filled from its start"
    assert sorted((capacity - taken.sum(axis=1)).tolist()) == one_by_one(lengths, capacity)


@pytest.mark.parametrize("lengths", [[0, 3], [3, 6]])
def test_lengths_out_of_range_are_refused(lengths):
    with pytest.raises(DloError, match=r"lengths must be in 1\.\.5"):
        pack_best_fit(np.array(lengths), 5)


BOUNDS = np.array([0, 1, 5, 16, 16, 20])  # documents of 1, 4, 11, 0 and 4 tokens: 0, 3, 10, none and 3 positions
ALL = np.arange(5)


def cut_to(policy, documents=ALL, seq_len=4):
    pieces = cut_documents(BOUNDS, documents, seq_len, policy)
    return list(zip(pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True)), pieces


def test_a_document_too_long_is_split_truncated_or_dropped():
    split, pieces = cut_to("split")
    assert split == [(1, 1, 3), (2, 5, 4), (2, 9, 4), (2, 13, 2), (4, 16, 3)]
    assert (pieces.too_long, pieces.too_short) == (1, 2)
    assert cut_to("truncate")[0] == [(1, 1, 3), (2, 5, 4), (4, 16, 3)]
    assert cut_to("drop")[0] == [(1, 1, 3), (4, 16, 3)]


def test_a_document_too_long_is_an_error_that_names_it_and_what_it_needs():
    with pytest.raises(DloError, match=r"document 2: .* at most 5 tokens .*, got 11 \(1 .*raise seq_len by 6"):
        cut_to("error")
    assert cut_to("error", seq_len=10)[1].too_long == 0


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from(["split", "truncate", "drop"]),
    st.integers(0, 2**32 - 1),
)
def test_targets_are_counted_as_one_would(sizes, seq_len, policy, seed):
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    learned = np.random.default_rng(seed).random(int(bounds[-1])) < 0.5
    pieces = cut_documents(bounds, np.arange(len(sizes)), seq_len, policy)
    expected = [
        int(learned[start + 1 : start + length + 1].sum())
        for start, length in zip(pieces.start, pieces.length, strict=True)
    ]
    assert count_targets(learned, pieces).tolist() == expected
    if policy == "split":  # each position is in one piece
        assert pieces.length.sum() == sum(max(0, size - 1) for size in sizes)


def test_bucketed_batches_have_like_lengths_and_the_order_is_a_permutation():
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, 1003), 1, 512).astype(int)
    order = bucket_by_length(lengths, 8, seed=3, epoch=1)
    assert sorted(order.tolist()) == list(range(1003))
    assert order[1000:].tolist() == [1000, 1001, 1002]  # what fills no batch is what was drawn last
    batches = lengths[order[:1000]].reshape(-1, 8)
    plain = lengths[:1000].reshape(-1, 8)
    padded, unsorted = (int(some.max(axis=1).sum()) * 8 / int(lengths[:1000].sum()) for some in (batches, plain))
    assert padded < 1.1 < 1.8 < unsorted
    assert not (np.diff(batches[:, 0]) >= 0).all()  # batches are not in the order of their lengths
    assert not np.array_equal(order, bucket_by_length(lengths, 8, seed=3, epoch=2))


# --- the token cache: what is written is read, and nothing else is ---------------------------------------------------


def document(ids, learned=None, digest=1, file=0, row=1):
    flags = np.ones(len(ids), dtype=bool) if learned is None else np.array(learned, dtype=bool)
    return Document(np.array(ids, dtype=np.int64), flags, digest, file, row)


DOCUMENTS = [document([5, 6, 7]), document([], digest=2**64 - 1, row=2), document([0, 299], [0, 0], file=1, row=7)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.bin"
    write_store(path, iter(DOCUMENTS), 300)
    return path


def test_what_is_written_is_read(path):
    store = TokenStore(path)
    ids, learned = store.read(np.arange(5))
    assert ids.tolist() == [5, 6, 7, 0, 299]
    assert learned.tolist() == [True, True, True, False, False]
    assert store.learned().tolist() == learned.tolist()
    assert store.bounds.tolist() == [0, 3, 3, 5]
    assert store.hashes.tolist() == [1, 2**64 - 1, 1]
    assert (store.files.tolist(), store.rows.tolist()) == ([0, 0, 1], [1, 2, 7])
    assert len(store) == 3
    assert not store.all_learned
    verify_checksum(path)
    assert os.listdir(path.parent) == ["tokens.bin"]


@pytest.mark.parametrize(("vocab_size", "bytes_each"), [(1 << 15, 2), ((1 << 15) + 1, 4)])
def test_a_token_takes_two_bytes_where_they_are_enough(tmp_path, vocab_size, bytes_each):
    path = tmp_path / "tokens.bin"
    write_store(path, [document([vocab_size - 1] * 4096)], vocab_size)
    assert path.stat().st_size == 4096 * (1 + bytes_each) + 8 * (2 + 1 + 1 + 1)
    ids, learned = TokenStore(path).read(np.arange(4096))
    assert set(ids.tolist()) == {vocab_size - 1}
    assert learned.all()
    assert TokenStore(path).all_learned


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(DloError, match=r"the tokenizer's vocabulary size 32768, got 40000; correct the tokenizer"):
        write_store(tmp_path / "tokens.bin", [document([1]), document([1, 40_000])], 1 << 15)
    assert os.listdir(tmp_path) == []


def test_a_store_that_is_sent_to_a_worker_maps_the_file_again(path):
    sent = pickle.dumps(TokenStore(path))
    assert len(sent) < 1000
    assert pickle.loads(sent).read(np.array([1]))[0].tolist() == [6]


@pytest.mark.parametrize(
    ("place", "message"), [(0, "not of this format"), (60, "damaged header"), (4096, "checksum"), (-1, "checksum")]
)
def test_a_changed_byte_is_found(path, place, message):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedTokenCache, match=message):
        verify_checksum(path)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def broken():
        yield document([1, 2])
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_store(tmp_path / "tokens.bin", broken(), 300)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_writer_has_left_is_cleared_in_time(tmp_path):
    old, new = tmp_path / "a.bin.1.dlo-partial", tmp_path / "b.bin.2.dlo-partial"
    for left in (old, new):
        left.write_text("unfinished")
    os.utime(old, (0, 0))
    write_store(tmp_path / "tokens.bin", [], 300)
    assert sorted(os.listdir(tmp_path)) == [new.name, "tokens.bin"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DloError, match=r"cannot be written to .*file.*set cache_dir"):
        write_store(tmp_path / "file" / "tokens.bin", [], 300)


# what a step has to know of a batch is counted before the batch is moved, and the device is not asked for it


PLACES = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])


def task() -> CausalLM:
    torch.manual_seed(0)
    made = CausalLM(config={"model_type": "llama", **GROUPED})
    made.configure_model()
    return made


def batch(**more: Any) -> dict[str, Tensor]:
    return {**packed_rows(4, torch.Generator().manual_seed(3)), **more}


def as_moved(found: dict[str, Tensor]) -> dict[str, Tensor]:
    batches.attach_counts(found, batches.count_rows(found))
    return found


@pytest.mark.parametrize("targets", ["some", "all", "none"])
def test_a_loss_whose_targets_are_counted_asks_for_nothing_and_is_the_same(targets: str) -> None:
    made, found = task(), batch(tokens_in_step=torch.tensor(50))
    if targets != "some":
        found["labels"].fill_(3 if targets == "all" else -100)
    hidden = made.forward(**made.inputs(found)[1])
    with Waits() as waits:
        expected = made.loss(hidden, found)
    assert waits.calls == ["nonzero"]
    as_moved(found)
    with Waits() as waits:
        inputs = made.inputs(found)
        loss = made.loss(hidden, found)
    assert waits.calls == []
    assert torch.equal(loss, expected)
    assert inputs[1]["input_ids"] is found["input_ids"]


def test_documents_that_are_counted_are_not_asked_for_and_others_once() -> None:
    positions = PLACES.clone()
    with Waits() as waits:
        expected = families.flash_arguments(positions)
    assert waits.calls == ["tolist"]
    assert expected["cu_seq_lens_q"].tolist() == [0, 3, 8, 14, 16]
    assert expected["max_length_q"] == 6
    as_moved({"position_ids": positions})
    with Waits() as waits:
        found = families.flash_arguments(positions)
    assert waits.calls == []
    assert torch.equal(found["cu_seq_lens_k"], expected["cu_seq_lens_k"])
    assert found["max_length_k"] == 6


def test_counts_are_of_these_very_tensors_as_they_were() -> None:
    found = as_moved(batch())
    number = int((found["labels"] != -100).sum())
    assert batches.read_target_count(found["labels"]) == number
    other = found["labels"].t().contiguous().t()  # of the same shape, in another order
    for part in (found["labels"][:, :4], found["labels"].T, found["labels"].flatten(), found["labels"][::2], other[:2]):
        assert batches.read_target_count(part) is None
    assert batches.read_target_count(found["labels"].clone()) is None
    assert batches.count_documents(PLACES) == (4, 6, 1)
    assert batches.count_documents(torch.tensor([[5, 6, 7, 8], [2, 3, 9, 10]])) == (3, 4, 0)
    found["labels"][found["labels"] != -100] = -100
    assert batches.read_target_count(found["labels"]) is None
    assert task().training_step(found, 0)["loss"] == 0
    with torch.inference_mode():  # Where tensors do not note that they are written to.
        assert batches.read_target_count(as_moved(batch())["labels"].clone()) is None


@pytest.mark.parametrize("is_view", [False, True])
def test_rows_of_a_batch_are_known_too(is_view: bool) -> None:
    """As a pipeline cuts micro-batches."""
    whole = batch()
    if is_view:  # as a loader may cut batches of a tensor
        before = {name: torch.cat([torch.zeros_like(value), value]) for name, value in whole.items()}
        as_moved({name: value[:4] for name, value in before.items()})
        whole = {name: value[4:] for name, value in before.items()}
    found = as_moved(whole)
    labels, positions = found["labels"], found["position_ids"]
    for first, past in ((0, 2), (1, 4), (3, 4), (0, 4)):
        with Waits() as waits:
            number = batches.read_target_count(labels[first:past])
            documents = batches.count_documents(positions[first:past])
        assert waits.calls == []
        assert number == int((labels[first:past] != -100).sum())
        assert documents == batches.count_documents(positions[first:past].clone())
    labels[0] = -100
    assert batches.read_target_count(labels[2:]) is None  # written to since


def test_batches_of_no_text_are_left_alone() -> None:
    for other in ((torch.zeros(2, 3), torch.zeros(2)), {"input_ids": torch.zeros(2, 3)}, torch.zeros(2)):
        assert batches.count_rows(other) == {}
