"""What a step has to know of a batch is counted before the batch is moved, and the device is not asked for it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from dlo_tasks.language import batches, families
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import GROUPED, packed_rows
from support.trainers import quiet_trainer
from support.waits import Waits

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


class Noting(Callback):
    """Notes what is known of each training batch, and what there is."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        labels = batch["labels"]
        self.pairs.append((batches.read_target_count(labels), int((labels != -100).sum())))
        assert batches.count_documents(batch["position_ids"]) == batches.count_documents(
            copy.deepcopy(batch["position_ids"])
        )


def test_the_datamodule_counts_what_it_gives_out(make, tmp_path) -> None:
    noting = Noting()
    run = quiet_trainer(callbacks=[noting], max_steps=3, limit_val_batches=0, default_root_dir=tmp_path)
    sizes = {name: size for name, size in GROUPED.items() if name != "vocab_size"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batch_transfer.*")
        run.fit(CausalLM(config={"model_type": "llama", **sizes}), make())
    assert len(noting.pairs) == 3
    assert all(known == there for known, there in noting.pairs)
