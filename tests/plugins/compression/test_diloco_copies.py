"""DiLoCo on meshes: copies of several ranks train as the single ranks of ddp do, and resume exactly."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from dlo_framework.checkpoint import load
from dlo_framework.models.experts import MixtureOptions
from dlo_framework.testing import run_distributed
from dlo_plugins.compression.diloco import DiLoCo
from dlo_plugins.gradients.clipping_and_noise import AdaptiveGradientClipping
from support.curricula_runs import apart, fit, prepare_texts, refusal, same, saved_state, seeded, texts
from support.runs import Watch

PERIOD, STOP = 3, 5
OPTIONS: dict[str, Any] = {
    "batches": 8,
    "epochs": 2,
    "accumulate_grad_batches": 2,
    "limit_val_batches": 1,
    "gradient_clip_val": 0.05,
    "log_every_n_steps": 1,
    "precision": "64-true",
}


def run(folder: Path, strategy: str, world: int, name: str, *more: Any, **options: Any) -> list[float]:
    """Trains, saves `last.ckpt` in a folder of the name and returns the losses; with experts if the name has `ep`."""
    home = folder / name
    home.mkdir(exist_ok=True)
    seeded()
    logger = CSVLogger(home, name="", version="")
    experts = {"experts": MixtureOptions(count=4, aux_loss=0.0, z_loss=0.01)} if "ep" in name.split() else {}
    made = texts(folder, weight_decay=0.05, config={"tie_word_embeddings": True}, **experts)
    callbacks = [DiLoCo(PERIOD), AdaptiveGradientClipping(0.02), *more]
    found, _ = fit(home, made, strategy, world, callbacks, logger=logger, **OPTIONS | options)
    return found


def logged(folder: Path, name: str, key: str = "diloco/change") -> list[float]:
    """Returns what a run has logged."""
    head, *lines = (folder / name / "metrics.csv").read_text().splitlines()
    column = head.split(",").index(key)
    return [float(line.split(",")[column]) for line in lines if line.split(",")[column]]


def _by_rank(rank: int, world: int, folder: Path, with_ep: bool) -> dict[str, Any]:
    found = {
        name: run(folder, name.split()[0], world, name) for name in ("ddp", "copies", "ddp with ep")[: 2 + with_ep]
    }
    run(folder, "copies", world, "stopped", Watch(folder / "of_ranks.ckpt", STOP, stops=True))
    for name in ("zero1", "zero3", "fsdp", "tp", "deepspeed_1"):
        found[name] = refusal(lambda name=name: fit(folder, texts(folder), name, world, [DiLoCo()], check=False))
    found["late"] = refusal(lambda: fit(folder, texts(folder), "late copies", 4, [DiLoCo()]))
    return found


def _by_copy(rank: int, world: int, folder: Path, strategies: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in strategies:
        whole = run(folder, strategy, world, strategy)
        saved = folder / f"{strategy}.ckpt"
        run(folder, strategy, world, f"{strategy} stopped", Watch(saved, STOP, stops=True))
        found[strategy] = whole, run(folder, strategy, world, f"{strategy} resumed", ckpt_path=saved)
    said = "weights and optimizer states of 2 ranks, and this run has 2 copies of"
    with pytest.warns(UserWarning, match=said) if rank == 0 else contextlib.nullcontext():
        run(folder, strategies[0], world, "from ranks", ckpt_path=folder / "of_ranks.ckpt")
    return found


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "strategies",
    [
        pytest.param(["copies x shard"], marks=pytest.mark.slow),
        pytest.param(["copies x sp", "copies x pp", "copies x cp", "copies x ep"], marks=pytest.mark.slow),
    ],
    ids=["shards", "other axes"],
)
def test_copies_of_two_ranks_train_as_ranks_of_ddp_do(tmp_path: Path, strategies: list[str]) -> None:
    prepare_texts(tmp_path)
    by_rank = run_distributed(_by_rank, 2, tmp_path, "copies x ep" in strategies, timeout=400)
    by_copy = run_distributed(_by_copy, 4, tmp_path, strategies, timeout=400)
    expected, moved = saved_state(tmp_path / "ddp" / "last.ckpt"), logged(tmp_path, "ddp")
    assert len(moved) == 3
    assert all(value > 1e-3 for value in moved)
    assert any(value > 0 for value in logged(tmp_path, "ddp", "optim/agc_clipped"))
    for name in ("copies", *strategies):
        found = saved_state(tmp_path / name / "last.ckpt")
        if name == "copies x ep":
            expected, moved = saved_state(tmp_path / "ddp with ep" / "last.ckpt"), logged(tmp_path, "ddp with ep")
        assert max(apart(found, expected).values(), default=0.0) < 1e-12, name
        assert logged(tmp_path, name) == pytest.approx(moved, rel=1e-10), name
    for strategy in strategies:
        # Each step before a resume is two batches of accumulation.
        assert all(resumed == whole[2 * STOP :] for whole, resumed in (found[strategy] for found in by_copy))
        assert same(
            saved_state(tmp_path / f"{strategy} resumed" / "last.ckpt"), saved_state(tmp_path / strategy / "last.ckpt")
        )
        saved = load(tmp_path / f"{strategy}.ckpt")
        first, second = saved["diloco"]["local"]["0.weight.model.model.layers.0.input_layernorm.weight"]
        assert not bool((first == second).all())  # The copies trained by themselves.
        embedded, head = (saved["state_dict"][f"model.{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
        assert bool((embedded == head).all())
    for found in by_rank:
        for name in ("zero1", "zero3", "fsdp", "tp", "deepspeed_1"):
            assert "its ranks hold one copy of the model together" in found[name], name
        assert "its schedule applies the gradients of the step before" in found["late"]
