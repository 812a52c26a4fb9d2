"""Optimizers that share their state among ranks by themselves: its bytes, and its checkpoints, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.local_memory import optimizer_bytes
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_framework.watch.state_bytes import StateReport
from support.fsdp_nets import Module, alone, differ, found_by, mine, of, trainer

STEP_BYTES = 4  # AdamW's count of steps, for each parameter.


class Shared(Module):
    """AdamW, each rank with the state of some of the parameters."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=self.rate, eps=1e-5)


class Whole(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, eps=1e-5)


def _redundancy(rank: int, world: int, folder: Path) -> Any:
    report, module = StateReport(), Shared()
    run = trainer(world, DataParallelStrategy(), max_epochs=2, callbacks=[report])
    run.fit(module, mine(rank, world))
    weights, held = gather_full_weights(run), optimizer_bytes(run.optimizers)
    half = trainer(world, DataParallelStrategy())
    half.fit(Shared(), mine(rank, world))
    half.save_checkpoint(folder / "half.ckpt")
    found = {}
    for name, make in (("its own", Shared), ("AdamW", Whole)):
        resumed = trainer(world, DataParallelStrategy(), max_epochs=2)
        resumed.fit(make(), mine(rank, world), ckpt_path=folder / "half.ckpt")
        gathered = gather_full_weights(resumed)
        found[name] = resumed.global_step, differ(gathered, weights) if rank == 0 else 0.0
    reference = alone(Whole(), epochs=2) if rank == 0 else weights
    return held, report.found.optimizer, found, differ(weights, reference) if rank == 0 else 0.0


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by((_redundancy,), rank, world, folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("shared"), timeout=200)


def test_zero_redundancy_optimizer_is_counted_on_each_rank_by_itself(ranks: list[dict[str, Any]]) -> None:
    parameters = list(Module().parameters())
    whole = 2 * 4 * sum(p.numel() for p in parameters) + STEP_BYTES * len(parameters)
    bytes_held = [found[0] for found in of(ranks, "_redundancy")]
    assert sum(bytes_held) == whole
    assert min(bytes_held) > 0
    assert {found[1] for found in of(ranks, "_redundancy")} == {float(max(bytes_held))}


def test_zero_redundancy_optimizer_is_saved_and_goes_on_and_plain_adamw_with_its_state(
    ranks: list[dict[str, Any]],
) -> None:
    _, _, resumed, difference = of(ranks, "_redundancy")[0]
    assert difference < 1e-6
    assert resumed == {name: (8, pytest.approx(0.0, abs=1e-6)) for name in ("its own", "AdamW")}
