"""Exchanges of experts that overlap with the other micro-batch's computation: bit-equal to those that do not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from dlo_framework.experts import MixtureOptions
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_plugins.appliers.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_tasks.llm.causal_lm import CausalLM
from support.causal_types import tiny
from support.token_batches import FAMILIES, VOCABULARY, Tokens

STEPS, MICRO_BATCHES = 2, 6
#: dlo's own mixtures in every second block: half of the stages have none.
EVERY_SECOND = {"count": 6, "every": 2, "aux_loss": 0.5, "bias_rate": 0.01, "capacity_factor": 1.5}


def moe(own: dict[str, Any] | None = None, dropout: float = 0.0, **options: Any) -> CausalLM:
    config = tiny("mixtral", vocab_size=VOCABULARY, num_hidden_layers=4, attention_dropout=dropout)
    if own is not None:
        config = {"model_type": "llama", **FAMILIES["llama"], "num_hidden_layers": 4, "attention_dropout": dropout}
        options["experts"] = MixtureOptions(**own)
    return CausalLM(config=config, **{"lr": 1e-2, **options})


class Watch(Callback):
    """Records each step's loss, and the bytes that were exchanged; runs pairs one after the other unless `overlaps`."""

    def __init__(self, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.losses: list[float] = []
        self.sent = self.overlapped = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pipeline = trainer.strategy.pipelined.pipeline  # type: ignore[attr-defined]
        assert pipeline.turns is not None
        if not self.overlaps:
            pipeline.turns = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        exchanges = trainer.strategy.appliers.experts.exchanges.values()  # type: ignore[attr-defined]
        self.sent = sum(exchange.sent_bytes for exchange in exchanges)
        self.overlapped = sum(exchange.overlapped_bytes for exchange in exchanges)


def fitted(
    folder: Path, overlaps: bool, model: dict[str, Any], mesh: dict[str, Any], recompute: bool, precision: str
) -> tuple[Watch, dict[str, Tensor]]:
    seed_everything(0, verbose=False)
    watch = Watch(overlaps)
    appliers = [ActivationCheckpoint()] if recompute else []
    strategy = MeshStrategy(pp=2, schedule="DualPipeV", micro_batches=MICRO_BATCHES, appliers=appliers, **mesh)
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 4, "strategy": strategy, "max_steps": STEPS, "callbacks": [watch]},  # type: ignore[arg-type]
        **{"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "precision": precision},
        **{"enable_checkpointing": False, "default_root_dir": folder},
    )
    trainer.fit(moe(**model), datamodule=Tokens(1, rows=2 * MICRO_BATCHES, steps=STEPS))
    return watch, gather_full_weights(trainer)


DATA: dict[str, Any] = {"dp_shard": 2, "ep": 2}
RECOMPUTED = "recomputed with dropout"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool, str]] = {
    RECOMPUTED: ({"dropout": 0.2}, DATA, True, "32-true"),
    "plain": ({}, DATA, False, "32-true"),
    "half of the stages without experts": ({"own": EVERY_SECOND}, DATA, True, "bf16-mixed"),
    "shared sequences": ({}, {"dp_shard": 1, "cp": 2, "ep": 2}, True, "32-true"),
}


def on_ranks(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    silence_lightning()
    found: dict[str, Any] = {}
    for name in names:
        (watch, weights), (apart, expected) = fitted(folder, True, *CASES[name]), fitted(folder, False, *CASES[name])
        equal = all(torch.equal(weights[key], expected[key]) for key in expected)
        found[name] = equal, watch.losses, apart.losses, (watch.sent, watch.overlapped), (apart.sent, apart.overlapped)
    leave_group()
    return found


def check(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        stage = rank // 2  # Of the pipeline's two ranks.
        for name, (equal, losses, expected, (sent, overlapped), apart) in found.items():
            assert losses == expected, name
            assert losses[0] != losses[1], name
            assert equal, name
            assert apart == (sent, 0), name
            # Of all forwards and backwards, those in pairs overlap. Recomputation exchanges half as much again: the
            # exchanges of a backward that follow its pair's forward do not overlap.
            paired = (2 * MICRO_BATCHES - 3 * 2 + stage + 1) / (2 * MICRO_BATCHES)
            share = paired * 2 / 3 if CASES[name][2] else paired
            if "without experts" in name:
                assert 0 < overlapped < share * sent, name
            else:
                assert overlapped / sent == pytest.approx(share, abs=0.05), name


def test_overlap_changes_no_bit_of_a_run_that_recomputes_with_dropout(tmp_path: Path) -> None:
    check(run_distributed(on_ranks, 4, tmp_path, [RECOMPUTED], backend=None, timeout=280))


@pytest.mark.slow
def test_overlap_changes_no_bit_of_other_runs(tmp_path: Path) -> None:
    check(run_distributed(on_ranks, 4, tmp_path, [*CASES][1:], backend=None, timeout=1200))


def parity_case(mesh: dict[str, Any], recompute: bool) -> Case:
    options: dict[str, Any] = {"pp": 2, "schedule": "DualPipeV", "micro_batches": MICRO_BATCHES, **mesh}
    options["appliers"] = [ActivationCheckpoint()] if recompute else []
    trainer = {"precision": "64-true", "gradient_clip_val": 0.5}
    return Case(partial(MeshStrategy, **options), {}, trainer, f"{mesh} {recompute}")


def model_and_data() -> tuple[Any, Any]:
    return moe(lr=1e-3, optimizer_args={"eps": 1e-4}), Tokens(1, rows=2 * MICRO_BATCHES, steps=STEPS)


@pytest.mark.slow
def test_overlapped_runs_train_as_one_process() -> None:
    shared = {"dp_shard": 1, "cp": 2, "ep": 2}
    cases = [parity_case(DATA, False), parity_case(DATA, True), parity_case(shared, True)]
    assert_parity(model_and_data, cases, steps=STEPS, rtol=1e-6, world_size=4, timeout=1200)
