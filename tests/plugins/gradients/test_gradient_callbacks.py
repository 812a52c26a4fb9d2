"""Adaptive clipping and noise of gradients that ranks divide: two ranks have the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from dlo_framework.testing import run_distributed
from dlo_plugins.gradients.clipping_and_noise import AdaptiveGradientClipping, GradientNoise
from support.curricula_runs import apart, fit, images, prepare_texts, saved_state, seeded, texts

#: By name: the model, the options of the task, and those of the trainer.
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "images": (images, {"optimizer": "momentum", "optimizer_args": {}}, {"precision": "64-true"}),
    # A tied embedding has a copy on both ends of a pipeline; a matrix optimizer steps full tensors.
    "texts": (
        texts,
        {"config": {"tie_word_embeddings": True}, "optimizer": "momentum", "optimizer_args": {}},
        {"precision": "64-true", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    ),
    "full tensors": (texts, {"optimizer": "lamb", "optimizer_args": {}}, {"precision": "64-true"}),
    # DeepSpeed has no double precision.
    "single": (texts, {"optimizer": "momentum", "optimizer_args": {}}, {"accumulate_grad_batches": 2}),
}
#: What runs each time: each kind of division. The composition table has the other strategies.
SOME = {"texts": ["pp"], "full tensors": ["tp"]}
OTHERS = {"images": ["zero2"], "texts": ["zero3_offload", "tp"], "single": ["deepspeed_3"]}


class Fractions(DummyLogger):
    """Logged fractions of clipped units."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.values += [value for name, value in metrics.items() if name == "optim/agc_clipped"]


def _runs(rank: int, world_size: int, folder: Path, wanted: dict[str, list[str]]) -> dict[str, Any]:
    found = {}
    for model, strategies in wanted.items():
        make, task, options = MODELS[model]
        for strategy in strategies:
            home = folder / f"{model} {strategy}"
            home.mkdir(exist_ok=True)
            seeded()
            made = make(**task) if make is images else make(folder, **task)
            callbacks = [AdaptiveGradientClipping(0.05), GradientNoise(1e-4, seed=5)]
            logger = Fractions()
            given = {"batches": 4, "epochs": 1, "logger": logger, "log_every_n_steps": 1, **options}
            losses, _ = fit(home, made, strategy, world_size, callbacks, **given)
            found[f"{model} {strategy}"] = losses, logger.values
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("gradients")
    prepare_texts(home)
    return home


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process does, by model; filled as it is asked for."""
    return {}


def compare(folder: Path, alone: dict[str, Any], wanted: dict[str, list[str]]) -> None:
    new = {model: ["auto"] for model in wanted if f"{model} auto" not in alone}
    alone |= run_distributed(_runs, 1, folder, new, backend=None, timeout=300)[0]
    ranks = run_distributed(_runs, 2, folder, wanted, timeout=900)
    wrong: dict[str, Any] = {}
    for model, strategies in wanted.items():
        rtol = {"single": 2e-5}.get(model, 1e-9)
        expected, fractions = alone[f"{model} auto"]
        assert fractions, "something is logged"
        assert max(fractions) > 0.05, "something is clipped"
        assert min(fractions) < 0.95, "not all is clipped"
        one = saved_state(folder / f"{model} auto" / "last.ckpt")
        for strategy in strategies:
            two = saved_state(folder / f"{model} {strategy}" / "last.ckpt")
            off = {key: value for key, value in apart(one, two).items() if value > rtol}
            if off:
                wrong[f"{model} {strategy}"] = dict(sorted(off.items(), key=lambda item: -item[1])[:4])
            for rank, found in enumerate(ranks):
                losses, logged = found[f"{model} {strategy}"]
                if losses != pytest.approx(expected, rel=max(rtol, 1e-6)):  # They are in single precision.
                    wrong[f"{model} {strategy} losses {rank}"] = losses, expected
                if rank == 0 and logged != pytest.approx(fractions, abs=1e-6):
                    wrong[f"{model} {strategy} fractions"] = logged, fractions
    assert not wrong, wrong


@pytest.mark.timeout(600)
@pytest.mark.parametrize("wanted", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_two_ranks_are_one_process(folder, alone, wanted):
    compare(folder, alone, wanted)


def test_the_callbacks_change_training(folder, alone):
    """Without them the losses differ: the comparison above compares something."""
    compare(folder, alone, {"texts": []})
    seeded()
    make, task, options = MODELS["texts"]
    home = folder / "plain"
    home.mkdir(exist_ok=True)
    losses, _ = fit(home, make(folder, **task), "auto", 1, [], batches=4, epochs=1, **options)
    assert losses[0] == pytest.approx(alone["texts auto"][0][0], rel=1e-12)
    assert losses[-1] != pytest.approx(alone["texts auto"][0][-1], rel=1e-4)
    assert torch.isfinite(torch.tensor(losses)).all()
