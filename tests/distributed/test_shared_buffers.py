"""Buffers of the first rank on all: batch norm's statistics while a run evaluates, and what lies oddly in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_plugins.strategies.deepspeed import DeepSpeedBridge
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from support.fsdp_nets import WIDTH, Module, data, found_by, mine, of, trainer

STRATEGIES = {
    "ddp": DataParallelStrategy,
    "zero1": lambda: ZeroStrategy(1),
    "zero3": lambda: ZeroStrategy(3),
    "fsdp": FSDPStrategy,
}


class Normed(Module):
    """The net with a batch norm before its head."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.head = nn.Sequential(nn.BatchNorm1d(WIDTH), net.head)


#: Not ``ddp``: torch's own wrapper shares its buffers.
SHARING = {name: strategy for name, strategy in STRATEGIES.items() if name != "ddp"} | {
    "deepspeed": lambda: DeepSpeedBridge(1)
}


class Oddly(Module):
    """The net with buffers of the rank's own, which are no runs of memory."""

    @staticmethod
    def prepare(net: Any) -> None:
        rank = float(dist.get_rank())
        net.register_buffer("part", torch.full((3, 4), rank)[:, :2])
        net.register_buffer("scale", torch.full((1,), 1 + rank).expand(20_000))


def _oddly(rank: int, world: int, folder: Path) -> dict[str, tuple[float, float, float]]:
    found = {}
    for name, strategy in SHARING.items():
        run, module = trainer(world, strategy()), Oddly()
        run.fit(module, mine(rank, world))
        state = run.strategy.lightning_module_state_dict()
        part, scale = state["net.part"], state["net.scale"]
        found[name] = float(part.abs().max()), float(scale.min()), float(scale.max())
    return found


def _validated(rank: int, world: int, folder: Path) -> dict[str, tuple[float, float]]:
    found = {}
    for name, strategy in STRATEGIES.items():
        run, module = trainer(world, strategy(), limit_val_batches=1.0), Normed()
        run.fit(module, mine(rank, world), mine(rank, world))
        in_run = float(run.callback_metrics["val"])
        alone = Normed().eval()
        weights = gather_full_weights(run)
        if rank == 0:
            alone.load_state_dict(weights)
            with torch.no_grad():
                losses = [float(alone.loss(batch)) for batch in data()]
            found[name] = in_run, sum(losses) / len(losses)
    return found


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by((_validated, _oddly), rank, world, folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("buffers"), timeout=280)


def test_a_run_validates_what_its_checkpoints_hold(ranks: list[dict[str, Any]]) -> None:
    found = of(ranks, "_validated")[0]
    assert found.keys() == STRATEGIES.keys()
    for name, (in_run, of_weights) in found.items():
        assert in_run == pytest.approx(of_weights, abs=1e-6), name
    assert len({round(in_run, 5) for in_run, _ in found.values()}) == 1


def test_slices_and_expanded_buffers_are_shared_too(ranks: list[dict[str, Any]]) -> None:
    for found in of(ranks, "_oddly"):
        assert found == dict.fromkeys(SHARING, (0.0, 1.0, 1.0))
