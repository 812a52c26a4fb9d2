"""What a run on a mesh does beside training: measures, predictions, checkpoints, bytes; it is stopped and goes on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.finite import FiniteLoss
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_framework.testing.training import leave_group
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.pipeline.timeline import PipelineTimeline
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.text_data import TextData
from support.texts import lines, sentences
from support.token_batches import FAMILIES
from support.trainers import quiet_trainer

STRATEGIES = {
    "one": lambda: "auto",
    "pp": partial(MeshStrategy, pp=2, dp_shard=1, micro_batches=4),
    "tp": partial(MeshStrategy, tp=2, dp_shard=1),
    "cp": partial(MeshStrategy, cp=2, dp_shard=1),
}
#: Which leave each rank a part of the layers; the others cut parameters, or batches, and have tests of their own.
CUTS_LAYERS = ("pp", "tp")


VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}


def text(folder: Path) -> TextData:
    file = folder / "texts.jsonl"
    if not file.exists():
        lines(file, *({"text": text} for text in sentences(200)))
    options = {"vocab_size": 320, "corpus_bytes": 60_000, "val_fraction": 0.1}
    return TextData(str(file), cache_dir=str(folder / "cache"), seq_len=32, batch_size=16, **options)


def language_model() -> CausalLM:
    sizes = {**FAMILIES["qwen3"], "num_hidden_layers": 4, "vocab_size": 320}
    options: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, "schedule": "constant"}
    return CausalLM(config={"model_type": "qwen3", **sizes}, **options)


def classifier() -> ImageClassifier:
    return ImageClassifier("vit_tiny_patch16_224", model_args=VIT, num_classes=10, lr=1e-3)


def trainer(world_size: int, name: str, made: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"max_epochs": -1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    run = quiet_trainer(devices=world_size, strategy=made or STRATEGIES[name](), **settings | options)
    use_canonical_checkpoints(run)
    return run


# --- what else a run does, on two ranks -----------------------------------------------------------------------


def _measures(world_size: int, name: str, folder: Path) -> dict[str, float]:
    """Evaluates a language model and a classifier with random weights, and predicts with the latter."""
    seed_everything(3, workers=True, verbose=False)
    run, task = trainer(world_size, name, limit_val_batches=1.0), language_model()
    found = dict(run.validate(task, datamodule=text(folder), verbose=False)[0])
    if name in CUTS_LAYERS:
        again = trainer(world_size, name, limit_val_batches=1.0)  # A strategy of its own, for what the first has cut.
        assert again.validate(task, datamodule=text(folder), verbose=False)[0] == pytest.approx(found, rel=1e-6)
    if name != "cp":
        seed_everything(3, workers=True, verbose=False)
        run, task = trainer(world_size, name, limit_val_batches=1.0, limit_predict_batches=2), classifier()
        data = DigitsData(image_size=16, batch_size=100)  # 359 images: the last batch is a short one
        found |= {f"image {key}": value for key, value in run.validate(task, datamodule=data, verbose=False)[0].items()}
        predicted = torch.cat([torch.as_tensor(part) for part in run.predict(task, datamodule=data)])
        found["predictions"] = float(predicted.double().square().sum())
    return found


def _two(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, float]]:
    return {name: _measures(world_size, name, folder) for name in ("pp", "tp", "cp")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mesh")
    text(folder)
    return folder


def test_measures_and_predictions_are_those_of_one_process(folder) -> None:
    expected = _measures(1, "one", folder)
    for found in run_distributed(_two, 2, folder, backend=None):
        for name, measures in found.items():
            for key, value in measures.items():
                assert value == pytest.approx(expected[key], rel=1e-5), (name, key)
            assert measures.keys() >= {"val_loss", "val_perplexity", "val_bits_per_byte"}
        assert found["pp"].keys() == expected.keys()


# --- the picture of a pipeline --------------------------------------------------------------------------------


def _drawn(rank: int, world_size: int, folder: Path) -> Any:
    seed_everything(7, workers=True, verbose=False)
    run = trainer(
        world_size,
        "one",
        max_steps=3,
        made=MeshStrategy(pp=2, dp_shard=1, micro_batches=4, schedule="ZBH1"),
        callbacks=[PipelineTimeline(step=1)],
        default_root_dir=folder / "drawn",
        logger=CSVLogger(folder / "drawn"),
    )
    run.fit(language_model(), datamodule=text(folder))
    recording = run.strategy.engine.pipelined.pipeline.record
    return recording


def test_a_step_of_a_pipeline_is_drawn(folder) -> None:
    assert run_distributed(_drawn, 2, folder, backend=None) == [False, False]
    assert (folder / "drawn" / "pipeline.png").stat().st_size > 10_000
    (metrics,) = (folder / "drawn").rglob("metrics.csv")
    names, *rows = (row.split(",") for row in metrics.read_text().splitlines())
    (row,) = (row for row in rows if row[names.index("pipeline/bubble")])
    found = {name: float(value) for name, value in zip(names, row, strict=True) if value}
    assert 0 < found["pipeline/bubble_of_theory"] < 0.5
    assert found["pipeline/bubble_of_theory"] <= found["pipeline/bubble"] < 1


def test_the_picture_needs_a_pipeline() -> None:
    with pytest.raises(DloError, match="does not support SingleProcessStrategy: it has no pipeline"):
        trainer(1, "one", max_steps=1, callbacks=[PipelineTimeline()]).fit(classifier(), DigitsData(image_size=16))
    with pytest.raises(DloError, match="step must be the number of an optimizer step, from 0, got -1"):
        PipelineTimeline(step=-1)


# A 2x2 mesh with a pipeline: a NaN


EPOCHS, BATCHES = 2, 5


class Classifier(ImageClassifier):
    """Its loss is NaN in one batch, on the ranks that see the second half of the data."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        second = self.trainer.strategy.distributed_sampler_kwargs["rank"] == 1
        at = self.trainer.fit_loop.epoch_loop.batch_idx
        return loss * float("nan") if self.training and second and at == 3 else loss


def _nan(rank: int, world_size: int, folder: Path) -> tuple[int, int, bool, float, int]:
    """Returns steps that were skipped and taken, whether weights are finite, a loss, and losses that were looked at."""
    seed_everything(4, workers=True, verbose=False)
    finite, looked = FiniteLoss(on_nan="skip"), []
    look = finite._flag.look
    finite._flag.look = lambda loss: (looked.append(loss), look(loss))[1]  # type: ignore[method-assign]
    task = Classifier("vit_tiny_patch16_224", model_args=VIT, num_classes=10, lr=1e-3)
    trainer = quiet_trainer(
        devices=4,
        strategy=MeshStrategy(pp=2, dp_shard=2, micro_batches=2),
        **{"max_epochs": EPOCHS, "accumulate_grad_batches": 2, "limit_train_batches": BATCHES, "limit_val_batches": 2},
        callbacks=add_default_callbacks([finite], run_folder=folder, model=task, progress_bar=False, checkpoints=False),
        default_root_dir=folder,
    )
    trainer.fit(task, datamodule=DigitsData(image_size=16, batch_size=8))
    weights = gather_full_weights(trainer)
    answer = finite.skipped, trainer.global_step, all(bool(torch.isfinite(w).all()) for w in weights.values())
    loss = float(trainer.callback_metrics["val_loss"])
    leave_group()
    return *answer, loss, len(looked)


def test_all_ranks_leave_out_a_step_that_is_nan_on_one(tmp_path: Path) -> None:
    answers = run_distributed(_nan, 4, tmp_path, timeout=200)
    # The last stage's ranks look at each of two micro-batches' losses, before its backward; others see none.
    assert sorted(looked for *_, looked in answers) == [0, 0, 2 * EPOCHS * BATCHES, 2 * EPOCHS * BATCHES]
    for skipped, steps, finite, loss, _ in answers:
        assert skipped == EPOCHS  # One batch of each epoch.
        assert steps == EPOCHS * 3
        assert finite
        assert loss == pytest.approx(answers[0][3], rel=1e-6)
