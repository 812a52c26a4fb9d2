"""Sequence lengths that grow: rows, documents, targets and losses are right at each, and follow the run's position."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dlo_plugins.curriculum.sequence_length import SequenceLength, split_rows, truncate_rows
from dlo_tasks.language import batches
from support.curricula_runs import assert_refused, check_resume, fit, images, seeded, texts


def batch() -> dict[str, Any]:
    """Two rows of eight: documents of 5 and 3 tokens, and one of 8."""
    return {
        "input_ids": torch.arange(16).view(2, 8),
        "labels": torch.arange(1, 17).view(2, 8).clone(),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]]),
        "tokens_in_step": torch.tensor(16),
    }


def test_rows_are_cut_and_documents_begin_again():
    found = split_rows(batch(), 4)
    assert found["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert found["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert found["tokens_in_step"] == 16


def test_truncated_rows_have_no_count_of_the_step():
    found = truncate_rows(batch(), 6)
    assert found["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5]]
    assert "tokens_in_step" not in found


class Shapes(Callback):
    """Shapes and losses of the batches, and the loss of each document part by itself."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.tokens: list[torch.Tensor] = []
        self.expected: list[float] = []
        self.counted: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.shapes.append(tuple(batch["input_ids"].shape))
        self.tokens.append(batch["input_ids"].flatten().clone())
        self.counted.append(batches.read_target_count(batch["labels"]) is not None)
        total, number = 0.0, 0
        with torch.no_grad():
            for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
                edges = [*torch.nonzero(positions == 0).flatten().tolist(), len(ids)]
                for first, last in itertools.pairwise(edges):
                    logits = pl_module.model(input_ids=ids[None, first:last]).logits[0]
                    targets = labels[first:last]
                    total += float(
                        torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
                    )
                    number += int((targets != -100).sum())
        self.expected.append(total / number)


@pytest.mark.parametrize("method", ["split", "truncate"])
def test_the_loss_is_that_of_each_document_alone(folder, tmp_path, method):
    shapes, plain = Shapes(), Shapes()
    seeded()
    grow = SequenceLength(lengths={0: 8, "30%": 16, "60%": 32}, method=method)
    losses, _ = fit(tmp_path, texts(folder), "auto", 1, [grow, shapes], epochs=1, batches=6)
    fit(tmp_path, texts(folder), "auto", 1, [plain], epochs=1, batches=6)
    assert [shape[1] for shape in shapes.shapes] == [8, 8, 16, 16, 32, 32]
    assert losses == pytest.approx(shapes.expected, rel=1e-5)
    assert all(shapes.counted + plain.counted)  # No step waits for the device to count.
    if method == "split":
        assert [shape[0] for shape in shapes.shapes] == [32, 32, 16, 16, 8, 8]
        assert all(torch.equal(one, two) for one, two in zip(shapes.tokens, plain.tokens, strict=True))
    else:
        assert {shape[0] for shape in shapes.shapes} == {8}


def test_it_grows_linearly(folder):
    grow = SequenceLength(start=8, until="50%", method="truncate")
    grow._until = 0.5
    assert [grow.length_at(at, 32, 0) for at in (0, 0.25, 0.4, 0.5, 1)] == [8, 16, 24, 32, 32]
    split = SequenceLength(start=8, until="50%")
    split._until = 0.5
    assert [split.length_at(at, 32, 0) for at in (0, 0.25, 0.4, 0.5, 1)] == [8, 16, 16, 32, 32]


def test_mixed_lengths_are_drawn_for_each_step():
    mixed = SequenceLength(lengths={0: [8, 16, 32]})
    mixed._points = [(0.0, [8, 16, 32])]
    drawn = [mixed.length_at(0.5, 32, step) for step in range(300)]
    assert all(80 < drawn.count(size) < 120 for size in (8, 16, 32))
    assert drawn == [mixed.length_at(0.1, 32, step) for step in range(300)]


def test_a_run_resumes_in_the_middle_of_a_step(folder, tmp_path):
    make = lambda: SequenceLength(lengths={0: [8, 16], "60%": 32})
    check_resume(tmp_path, make, lambda: texts(folder), batches=8, accumulate_grad_batches=2, epochs=1)


def test_runs_that_do_not_fit_are_refused(folder, tmp_path):
    message = "a length must be at most seq_len of the data, 32, got 64"
    assert_refused(message, tmp_path, texts(folder), SequenceLength(lengths={0: 64}))
    task, data = texts(folder)
    data.shape_batch = lambda batch: batch
    assert_refused("one callback must shape the batches, got two", tmp_path, (task, data), SequenceLength(8))
    message = "batches must be dicts with input_ids [B, N], got tuple"
    assert_refused(message, tmp_path, images(), SequenceLength(8))
