"""Batch norm's statistics while a run evaluates: the first rank's, as its checkpoints have them, in each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.testing import run_distributed
from dlo_framework.testing.state import whole_weights
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from support.fsdp_nets import WIDTH, Module, data, mine, trainer

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


def _validated(rank: int, world: int, folder: Path) -> dict[str, tuple[float, float]]:
    found = {}
    for name, strategy in STRATEGIES.items():
        run, module = trainer(world, strategy(), limit_val_batches=1.0), Normed()
        run.fit(module, mine(rank, world), mine(rank, world))
        in_run = float(run.callback_metrics["val"])
        alone = Normed().eval()
        weights = whole_weights(run)
        if rank == 0:
            alone.load_state_dict(weights)
            with torch.no_grad():
                losses = [float(alone.loss(batch)) for batch in data()]
            found[name] = in_run, sum(losses) / len(losses)
    return found


def test_a_run_validates_what_its_checkpoints_hold(tmp_path: Path) -> None:
    found = run_distributed(_validated, 2, tmp_path, timeout=100)[0]
    assert found.keys() == STRATEGIES.keys()
    for name, (in_run, of_weights) in found.items():
        assert in_run == pytest.approx(of_weights, abs=1e-6), name
    assert len({round(in_run, 5) for in_run, _ in found.values()}) == 1
