"""Checkpoints of divided experts: full tensors by name, which one process and any other division take up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.checkpoints import Again, check_same, tensors
from support.runs import Watch
from support.token_batches import VOCABULARY, Tokens
from support.trainers import quiet_trainer

STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "ep": partial(MeshStrategy, dp_shard=2, ep=2),
    "ep over cp": partial(MeshStrategy, dp_shard=1, cp=2, ep=2),
    "tp": partial(MeshStrategy, dp_shard=1, tp=2),
    "zero3": partial(ZeroStrategy, 3),
    "ep, tp": partial(MeshStrategy, dp_shard=2, tp=2, ep=2),
    "fsdp of four": partial(MeshStrategy, dp_shard=4),
}
SAVED, STEPS = 2, 4


def train(world_size: int, optimizer: str, name: str, save: Path, resume: Path | None) -> list[float]:
    seed_everything(7, workers=True, verbose=False)
    watch = Watch(save if resume is None else None, SAVED)
    config = tiny("qwen3_moe", dropout=False, vocab_size=VOCABULARY, num_hidden_layers=2)
    trainer = quiet_trainer(
        devices=world_size,
        strategy=STRATEGIES[name](),
        max_steps=STEPS,
        max_epochs=-1,
        limit_val_batches=0,
        precision="64-true",
        callbacks=[watch, *([Again(save)] if resume is not None else [])],
        use_distributed_sampler=False,
    )
    use_canonical_checkpoints(trainer)
    model = CausalLM(config=config, lr=1e-3, optimizer=optimizer, optimizer_args={"eps": 1e-4})
    trainer.fit(model, datamodule=Tokens(1, rows=8, steps=STEPS), ckpt_path=resume)
    return watch.losses


def runs(
    rank: int, world_size: int, jobs: list[tuple[str, Path, Path | None]], optimizer: str = "adamw"
) -> list[list[float]]:
    return [train(world_size, optimizer, *job) for job in jobs]


def test_experts_are_saved_in_full_shape_and_go_on_under_any_division(tmp_path: Path) -> None:
    one = [("one", tmp_path / "one", None), ("one", tmp_path / "again", tmp_path / "one")]
    alone = runs(0, 1, one)
    jobs = [(name, tmp_path / name, None) for name in ("ep", "ep over cp")]
    jobs += [("ep", tmp_path / "ep from one", tmp_path / "one"), ("zero3", tmp_path / "zero", tmp_path / "ep")]
    jobs += [("tp", tmp_path / "tp from ep", tmp_path / "ep over cp")]
    found = run_distributed(runs, 2, jobs, backend=None)[0]
    for (name, save, resume), losses in zip(jobs, found, strict=True):
        # A resumed run begins with the data's first batch again.
        assert losses == pytest.approx(alone[resume is not None], rel=1e-6), (name, resume)
        if resume is not None:
            check_same(resume, save)
    losses = train(1, "adamw", "one", tmp_path / "back", tmp_path / "ep over cp")
    assert losses == pytest.approx(alone[1], rel=1e-6)
    check_same(tmp_path / "ep over cp", tmp_path / "back")
    saved = tensors(tmp_path / "ep")
    names = [name for name in saved if name.startswith("model/") and name.endswith("mlp.experts.down_proj")]
    assert len(names) == 2
    assert all(saved[name].shape == torch.Size([4, 32, 48]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_experts_that_ep_and_tp_both_cut_are_saved_in_full_shape(tmp_path: Path, optimizer: str) -> None:
    one = [("one", tmp_path / "one", None), ("one", tmp_path / "again", tmp_path / "one")]
    alone = runs(0, 1, one, optimizer)
    jobs = [("ep, tp", tmp_path / "both", None), ("ep, tp", tmp_path / "both from one", tmp_path / "one")]
    jobs += [("fsdp of four", tmp_path / "fsdp from both", tmp_path / "both")]
    found = run_distributed(runs, 4, jobs, optimizer, backend=None)[0]
    for (name, save, resume), losses in zip(jobs, found, strict=True):
        assert losses == pytest.approx(alone[resume is not None], rel=1e-6), (name, resume)
        if resume is not None:
            check_same(resume, save)
