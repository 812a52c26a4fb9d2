"""What a run on a mesh does beside training: measures, predictions, checkpoints from mesh to mesh, bytes held."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.registry import Registry
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import checksums, gather_full_weights
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.pipeline.timeline import PipelineTimeline
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.text_data import TextData
from support.texts import lines, sentences
from support.token_batches import FAMILIES

STRATEGIES = {
    "one": lambda: "auto",
    "tp x pp": partial(MeshStrategy, tp=2, pp=2, dp_shard=1, micro_batches=4),
    "zero3": partial(ZeroStrategy, 3),
    "cp x dp": partial(MeshStrategy, cp=2, dp_shard=2),
    "pp x dp": partial(MeshStrategy, pp=2, dp_shard=2, micro_batches=4, schedule="ZBV"),
    "tp x dp": partial(MeshStrategy, tp=2, dp_shard=2, sequence_parallel=True),
    "pp": partial(MeshStrategy, pp=2, dp_shard=1, micro_batches=4),
    "tp": partial(MeshStrategy, tp=2, dp_shard=1),
    "cp": partial(MeshStrategy, cp=2, dp_shard=1),
    "dp": partial(MeshStrategy, dp_shard=2),
}
#: Who takes a run up from whom, with how many steps more.
CHAIN, STEPS = ("tp x pp", "zero3", "cp x dp"), 3
LONG_CHAIN = (*CHAIN, "pp x dp", "tp x dp")
#: Which leave each rank a part of the layers; the others cut parameters, or batches, and have tests of their own.
CUTS_LAYERS = ("pp", "tp")


def text(folder: Path) -> TextData:
    file = folder / "texts.jsonl"
    if not file.exists():
        lines(file, *({"text": text} for text in sentences(200)))
    options = {"vocab_size": 320, "corpus_bytes": 60_000, "val_fraction": 0.1}
    return TextData(str(file), cache_dir=str(folder / "cache"), seq_len=32, batch_size=16, **options)


def language_model(optimizer: str = "adamw") -> CausalLM:
    sizes = {**FAMILIES["qwen3"], "num_hidden_layers": 4, "vocab_size": 320}
    options: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, "schedule": "constant"}
    options["optimizer"] = optimizer
    return CausalLM(config={"model_type": "qwen3", **sizes}, **options)


def classifier() -> ImageClassifier:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
    return ImageClassifier("vit_tiny_patch16_224", model_args=sizes, num_classes=10, lr=1e-3)


def trainer(world_size: int, name: str, made: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"max_epochs": -1, "limit_val_batches": 0, "num_sanity_val_steps": 0, "logger": False}
    run = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=made or STRATEGIES[name](),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings | options,
    )
    use_canonical_checkpoints(run)
    return run


class Losses(Callback):
    """Keeps each step's loss, the mean over the ranks, and saves in the end."""

    def __init__(self, save: Path | None) -> None:
        self.save, self.found = save, []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.save is not None:
            trainer.save_checkpoint(self.save)


def fit(
    world_size: int,
    name: str,
    folder: Path,
    steps: int,
    save: Path | None,
    resume: Path | None,
    optimizer: str = "adamw",
) -> list[float]:
    seed_everything(7, workers=True, verbose=False)
    losses = Losses(save)
    run = trainer(world_size, name, max_steps=steps, callbacks=[losses, ExactResume()])
    run.fit(language_model(optimizer), datamodule=text(folder), ckpt_path=resume)
    return losses.found


def _chain(rank: int, world_size: int, folder: Path, chain: tuple[str, ...], optimizer: str) -> list[list[float]]:
    found, before = [], None
    for number, name in enumerate(chain):
        after = folder / f"{number}.ckpt"
        found.append(fit(world_size, name, folder, STEPS * (number + 1), after, before, optimizer))
        before = after
    return found


@pytest.mark.parametrize(
    ("chain", "optimizer"),
    [
        pytest.param(CHAIN, "adamw", marks=pytest.mark.slow),
        # It steps full tensors, which tp ranks join from their slices.
        pytest.param(("tp x dp",), "lamb", marks=pytest.mark.slow),
        pytest.param(LONG_CHAIN, "adamw", marks=pytest.mark.slow),
        pytest.param(LONG_CHAIN, "lamb", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_mesh_to_mesh_to_zero_to_one_process(
    tmp_path: Path, chain: tuple[str, ...], optimizer: str
) -> None:
    steps, last = STEPS * (len(chain) + 1), tmp_path / f"{len(chain) - 1}.ckpt"
    whole = fit(1, "one", tmp_path, steps, None, None, optimizer)
    links = run_distributed(_chain, 4, tmp_path, chain, optimizer, backend=None)[0]
    links.append(fit(1, "one", tmp_path, steps, None, last, optimizer))
    assert [len(link) for link in links] == [STEPS] * len(links)
    assert [loss for link in links for loss in link] == pytest.approx(whole, rel=1e-6)


SCHEDULE = """
from dlo_plugins.parallel.pipeline.pipeline_schedules import Action, ActionKind
from dlo_plugins.parallel.pipeline.pipeline_schedules import SCHEDULES


@SCHEDULES.register("OneByOne")
def one_by_one(placement, rank, micro_batches):
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return [Action(kind, rank, number) for number in range(micro_batches) for kind in kinds]
"""


def _own_schedule(rank: int, world_size: int, folder: Path) -> dict[str, tuple[list[float], dict[str, int]]]:
    Registry().load_user_module(str(folder / "own_schedule.py"))
    found = {}
    for schedule in ("GPipe", "OneByOne"):
        seed_everything(7, workers=True, verbose=False)
        losses, strategy = Losses(None), MeshStrategy(pp=2, dp_shard=1, micro_batches=4, schedule=schedule)
        run = trainer(world_size, "", strategy, max_steps=3, callbacks=[losses])
        run.fit(language_model(), datamodule=text(folder))
        found[schedule] = losses.found, checksums(gather_full_weights(run))
    return found


def test_a_schedule_of_a_user_s_file_trains_as_gpipe_does(tmp_path: Path) -> None:
    (tmp_path / "own_schedule.py").write_text(SCHEDULE)
    text(tmp_path).prepare_data()
    found = run_distributed(_own_schedule, 2, tmp_path, backend=None)[0]
    assert found["OneByOne"] == found["GPipe"]
    assert found["GPipe"][0][-1] < found["GPipe"][0][0]


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


def _averaged(world_size: int, name: str, folder: Path) -> dict[str, Tensor]:
    """Returns the average of the weights of a training with accumulation and clipping, which stays in the module."""
    seed_everything(7, workers=True, verbose=False)
    more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "callbacks": [WeightEMA(decay=0.9)]}
    run = trainer(world_size, name, max_steps=3, **more)
    run.fit(language_model(), datamodule=text(folder))
    return gather_full_weights(run)


def _two(rank: int, world_size: int, folder: Path) -> Any:
    names = ("pp", "tp", "cp", "dp")
    found = {name: _measures(world_size, name, folder) for name in names}
    averages = {name: _averaged(world_size, name, folder) for name in CUTS_LAYERS}
    return found, averages


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def two(folder) -> list[Any]:
    text(folder)
    return run_distributed(_two, 2, folder, backend=None)


def test_measures_and_predictions_are_those_of_one_process(two, folder) -> None:
    expected = _measures(1, "one", folder)
    for found, _ in two:
        for name, measures in found.items():
            for key, value in measures.items():
                halves = key == "predictions" and name == "dp"  # Each rank has its own.
                assert value == pytest.approx(expected[key], rel=1e-5) or halves, (name, key)
            assert measures.keys() >= {"val_loss", "val_perplexity", "val_bits_per_byte"}
        assert found["pp"].keys() == expected.keys()


def test_averaged_weights_of_accumulated_and_clipped_steps_are_those_of_one_process(two, folder) -> None:
    expected = _averaged(1, "one", folder)
    for name, found in two[0][1].items():
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert float((found[key] - value).norm()) <= 1e-5 * float(value.norm()) + 1e-7, (name, key)


# --- bytes ----------------------------------------------------------------------------------------------------


def _bytes(rank: int, world_size: int, folder: Path) -> Any:
    found = {}
    for axes in BYTES:
        seed_everything(7, workers=True, verbose=False)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8}
        more = {"num_key_value_heads": 4, "vocab_size": 320, "tie_word_embeddings": False}
        task = CausalLM(config={"model_type": "llama", **sizes, **more, "max_position_embeddings": 64})
        run = trainer(world_size, "one", max_steps=1, made=MeshStrategy(**{"dp_shard": 1, **dict(axes)}))
        run.fit(task, datamodule=text(folder))
        found[axes] = run.strategy.state_bytes()
    return found


#: Each of them shares the state of one copy among all four ranks.
BYTES = (
    (("tp", 4),),
    (("pp", 4), ("micro_batches", 4)),
    (("dp_shard", 4),),
    (("cp", 4),),
    (("pp", 2), ("tp", 2), ("micro_batches", 4)),
    (("cp", 2), ("dp_shard", 2)),
    (("pp", 2), ("dp_shard", 2), ("micro_batches", 4)),
)


@pytest.mark.slow
def test_each_rank_holds_its_share_of_the_state(folder) -> None:
    text(folder)
    ranks = run_distributed(_bytes, 4, folder, backend=None)
    parameters = 8 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256 + 2 * 128) + 2 * 320 * 128 + 128
    for axes in BYTES:
        for kind, size in (("parameters", 4), ("optimizer", 8)):
            held = [found[axes][kind] for found in ranks]
            assert sum(held) == pytest.approx(size * parameters, rel=0.02), axes  # Nothing is held twice.
            # A pipeline's outer stages have the embedding, or the head, beside their blocks.
            more = size * 320 * 128 if dict(axes).get("pp") else 0
            assert max(held) <= 1.02 * size * parameters / 4 + more, axes


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
    recording = run.strategy.pipelined.pipeline.record
    return recording


def test_a_step_of_a_pipeline_is_drawn(folder) -> None:
    text(folder)
    assert run_distributed(_drawn, 2, folder, backend=None) == [False, False]
    assert (folder / "drawn" / "pipeline.png").stat().st_size > 10_000
    (metrics,) = (folder / "drawn").rglob("metrics.csv")
    names, *rows = (row.split(",") for row in metrics.read_text().splitlines())
    (row,) = (row for row in rows if row[names.index("pipeline/bubble")])
    found = {name: float(value) for name, value in zip(names, row, strict=True) if value}
    assert 0 < found["pipeline/bubble_of_theory"] < 0.5
    assert found["pipeline/bubble_of_theory"] <= found["pipeline/bubble"] < 1


def test_the_picture_needs_a_pipeline() -> None:
    with pytest.raises(DloError, match="got one without a pipeline"):
        trainer(1, "one", max_steps=1, callbacks=[PipelineTimeline()]).fit(classifier(), DigitsData(image_size=16))
    with pytest.raises(DloError, match="step must be the number of an optimizer step, from 0, got -1"):
        PipelineTimeline(step=-1)
