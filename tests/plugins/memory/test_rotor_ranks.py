"""Rotor on several ranks: gradients to the bit, and the planned forwards, under each strategy and model family."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from dlo_framework.distributed.strategy import DataParallelStrategy, register_data_parallel
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.memory.rotor_callback import Rotor
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import trainer
from support.rotor_runs import NetTask, assert_same, train

PARTS = 4  # micro-batches
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one process": lambda: "auto",
    "fsdp": FSDPStrategy,
    "zero3": lambda: ZeroStrategy(3),
    "tp": lambda: MeshStrategy(tp=2, dp_shard=1),
    "pp": lambda: MeshStrategy(pp=2, dp_shard=1, micro_batches=PARTS),
    "deepspeed_3": lambda: DeepSpeedBridge(stage=3),
}
BUDGETS = ("100%", "90%", "80%", "70%", "60%", "55%", "50%", "45%")


def compare(rank: int, world_size: int, kind: str, strategy: str, budgets: list[str]) -> list[str]:
    """Trains without Rotor and with each budget; returns what was planned on this rank."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    register_data_parallel()
    parts = PARTS if strategy == "pp" else 1
    plain, found = train(kind, None, STRATEGIES[strategy](), world_size), []
    for budget in budgets:
        try:
            seen = train(kind, budget, STRATEGIES[strategy](), world_size)
        except DloError as error:
            if "budget must be at least" not in str(error):
                raise
            found.append("does not fit")
            break
        assert seen.rotor is not None
        assert_same(plain, seen, parts)
        for plan in seen.rotor.plans:
            assert plan.peak <= plan.budget
            again = sum(plan.schedule.forwards) - len(plan.schedule.forwards)
            found.append(f"{again} again, {plan.measured.refusal or 'regions'}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["one process", "fsdp", "zero3", "tp", "pp"])
@pytest.mark.parametrize("kind", ["vit", "coatnet", "resnet", "llama"])
def test_families_and_strategies(kind: str, strategy: str) -> None:
    ranks = 1 if strategy == "one process" else 2
    for found in run_distributed(compare, ranks, kind, strategy, list(BUDGETS), backend=None, timeout=800):
        assert all("regions" in text or text == "does not fit" for text in found), found
        assert any(not text.startswith("0 ") for text in found[1:])


class Changing(DynamicBatchSize):
    """Callback that may change batches, and leaves it to the data."""

    def __init__(self) -> None:
        Callback.__init__(self)


for _name in {*vars(DynamicBatchSize)} & {*vars(Callback)} - {"__doc__", "__module__", "__init__"}:
    setattr(Changing, _name, vars(Callback)[_name])


def _larger_on_rank_0(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    """Trains with a batch that is larger on rank 0, and then with larger ones on both ranks."""
    sizes = [8] * 5 + [16 if rank == 0 else 8] + [8] * 2 + [32] * 6
    batches = [(torch.randn(size, 16), torch.randint(4, (size,))) for size in sizes]
    rotor = Rotor("80%")
    run = trainer(world_size, DataParallelStrategy(), callbacks=[rotor, Changing()], default_root_dir=folder)
    run.fit(NetTask(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return run.global_step, rotor._measured_bytes


def test_ranks_survey_again_together(tmp_path: Path) -> None:
    """A survey on one rank alone would leave it waiting for the others' plans."""
    assert run_distributed(_larger_on_rank_0, 2, tmp_path) == [(14, 32 * (16 * 4 + 8))] * 2


@pytest.mark.slow
def test_deepspeed_stage_3_is_refused() -> None:
    with pytest.raises(Exception, match="Rotor does not support DeepSpeedBridge: it gathers a block's parameters"):
        run_distributed(compare, 2, "vit", "deepspeed_3", ["70%"], backend=None, timeout=300)
