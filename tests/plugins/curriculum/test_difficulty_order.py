"""Easy samples first: each epoch has each sample once, in an order of the seed alone, on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from dlo_framework.data import Draw
from dlo_plugins.curriculum.difficulty_order import DifficultyOrder, competence, paced_order, read_scores, token_rarity
from support.curricula_runs import assert_refused, check_resume, fit, images, seeded, texts


def test_the_competence_is_the_papers():
    assert [competence(at, 0.1, True) for at in (0, 0.5, 1, 2)] == pytest.approx([0.1, np.sqrt(0.505), 1, 1])
    assert competence(0.5, 0.2, False) == pytest.approx(0.6)


def test_samples_are_drawn_from_the_easiest():
    draw = np.random.default_rng(0)
    shuffled, scores = draw.permutation(1000), draw.permutation(1000).astype(float)
    order = paced_order(shuffled, scores, lambda place: 0.1 + 0.9 * min(1, place / 0.5))
    assert sorted(order) == list(range(1000))
    found = scores[order]
    assert found[:10].max() < 100
    assert found[:250].max() < 100 + 900 * 0.5
    # Within the pool the order is random, not sorted.
    assert np.corrcoef(found[:100], np.arange(100))[0, 1] < 0.7
    assert found[500:].mean() > found[:500].mean()
    # A pool of everything leaves the order as it was.
    assert (paced_order(shuffled, scores, lambda place: 1.0) == shuffled).all()


class Seen(Callback):
    """Tokens of the batches."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rows += [tuple(row.tolist()) for row in batch["input_ids"]]
        self.dataset = trainer.train_dataloader.dataset


def test_a_run_begins_with_frequent_tokens(folder, tmp_path):
    seen = Seen()
    seeded()
    rarest_last = DifficultyOrder(metric="rarity", until="100%")
    fit(tmp_path, texts(folder), "auto", 1, [rarest_last, seen], epochs=1, batches=1.0)
    whole = seen.dataset.fetch([Draw(index, 0, True) for index in range(len(seen.dataset))])
    rarity = dict(zip(map(tuple, whole["input_ids"].tolist()), token_rarity(seen.dataset), strict=True))
    half = len(seen.rows) // 2
    first, last = (np.mean([rarity[row] for row in rows]) for rows in (seen.rows[:half], seen.rows[half:]))
    assert first < last


def test_rarity_is_the_mean_surprise():
    class Two:
        def __len__(self) -> int:
            return 2

        def fetch(self, draws: list[Any]) -> dict[str, torch.Tensor]:
            ids = torch.tensor([[0, 0, 1], [0, 2, 2]])[[draw.index for draw in draws]]
            labels = torch.tensor([[5, 5, 5], [5, 5, -100]])[[draw.index for draw in draws]]
            return {"input_ids": ids, "labels": labels}

    # Tokens with a target: 0, 0, 1 and 0, 2.
    common, rare = -np.log(3 / 5), -np.log(1 / 5)
    assert token_rarity(Two()) == pytest.approx([(2 * common + rare) / 3, (common + rare) / 2])


def test_scores_of_a_file_order_images_and_a_resume_is_exact(tmp_path):
    data = images()[1]
    data.setup("fit")
    scores = np.random.default_rng(0).random(len(data.train_dataloader().dataset))
    np.save(tmp_path / "scores.npy", scores)
    np.savetxt(tmp_path / "scores.txt", scores)
    assert read_scores(str(tmp_path / "scores.txt")) == pytest.approx(scores)
    make = lambda: DifficultyOrder(str(tmp_path / "scores.npy"), until="400 samples")
    whole = check_resume(tmp_path, make, images, batches=8)
    seeded()
    plain, _ = fit(tmp_path, images(), "auto", 1, [], batches=8)
    assert plain != whole


def test_runs_that_do_not_fit_are_refused(folder, tmp_path):
    np.save(tmp_path / "few.npy", np.arange(3.0))
    (tmp_path / "words.txt").write_text("easy\nhard\n")
    np.save(tmp_path / "table.npy", np.zeros((2, 2)))
    for name, message in (
        ("few.npy", "scores must have one number for each of the"),
        ("none.npy", "scores must be a .npy file, or text with a number per line"),
        ("words.txt", "scores must be a .npy file, or text with a number per line"),
        ("table.npy", "scores must be finite numbers, one per sample, got float64 of shape [2, 2]"),
    ):
        assert_refused(message, tmp_path, images(), DifficultyOrder(str(tmp_path / name), until="1 epochs"))
    rarity = DifficultyOrder(metric="rarity")
    assert_refused("metric must be left out for data without tokens", tmp_path, images(), rarity)
    assert_refused("packing must be best_fit, got none", tmp_path, texts(folder, data={"packing": "none"}), rarity)
    message = "trainer.max_epochs must be set for a point in percent"
    assert_refused(message, tmp_path, images(), rarity, epochs=-1, max_steps=3)
    task, data = images()
    data.order_at = lambda shuffled, epoch: shuffled
    few = DifficultyOrder(str(tmp_path / "few.npy"), until="1 epochs")
    assert_refused("only one callback must order the samples, got two", tmp_path, (task, data), few)
