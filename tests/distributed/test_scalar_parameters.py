"""A model with a parameter that has no dims (CLIP's temperature, a gate): trained, saved, and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.testing import run_distributed
from dlo_framework.testing.state import whole_weights
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from support.fsdp_nets import Block, Module, alone, differ, found_by, mine, of, trainer

STRATEGIES = {
    "ddp": DataParallelStrategy,
    "zero1": lambda: ZeroStrategy(1),
    "zero3": lambda: ZeroStrategy(3),
    "fsdp": FSDPStrategy,
}


class Gated(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * super().forward(x)


class Tempered(Module):
    """The net with a temperature, and blocks with a gate each."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.temperature = nn.Parameter(torch.tensor(0.7))
        net.blocks = nn.ModuleList([Gated() for _ in range(2)])

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]) * self.net.temperature, batch[1])


def _each(rank: int, world: int, folder: Path) -> dict[str, float]:
    expected, found = alone(Tempered(), epochs=2), {}
    for first in STRATEGIES:
        run = trainer(world, STRATEGIES[first](), max_epochs=1)
        run.fit(Tempered(), mine(rank, world))
        run.save_checkpoint(folder / f"{first}.ckpt")
        for then in STRATEGIES:
            run = trainer(world, STRATEGIES[then](), max_epochs=2)
            run.fit(Tempered(), mine(rank, world), ckpt_path=folder / f"{first}.ckpt")
            weights = whole_weights(run)
            found[f"{first}, then {then}"] = differ(weights, expected) if rank == 0 else 0.0
    return found


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by((_each,), rank, world, folder)


def test_any_strategy_goes_on_from_any_other(tmp_path: Path) -> None:
    differences = of(run_distributed(_ranks, 2, tmp_path, timeout=280), "_each")[0]
    assert len(differences) == len(STRATEGIES) ** 2
    assert differences == pytest.approx(dict.fromkeys(differences, 0.0), abs=1e-6)
