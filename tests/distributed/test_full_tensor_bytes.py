"""Elements that ranks exchange for a step of an optimizer of full tensors, beside its paper's or a peer's algorithm."""

from __future__ import annotations

from typing import Any

import torch

from dlo_framework.testing import run_distributed
from support.fsdp_nets import Batches, trainer
from support.optimizer_runs import STEPS, STRATEGIES, data, task


def _exchanged(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Returns the elements that this rank sends by all-to-all in a run, and those of the parameters."""
    found = {}
    for strategy in ("zero1", "zero3", "fsdp"):
        batches = Batches([tuple(part.chunk(world)[rank] for part in batch) for batch in data()])
        run = trainer(world, STRATEGIES[strategy](), max_steps=STEPS, max_epochs=-1)
        run.fit(task("muon"), batches)
        shares: Any = run.strategy.engine.shares
        (share,) = shares if isinstance(shares, list) else shares._shares.values()
        elements = sum(torch.Size(shape).numel() for shape in share.shapes.values())
        found[strategy] = share.communicator.elements["exchange"], elements
    return found


def test_gradients_and_values_travel_once_each_way() -> None:
    ranks = run_distributed(_exchanged, 2, timeout=200)
    for strategy, times in (("zero1", 2), ("zero3", 3), ("fsdp", 3)):
        sent = sum(found[strategy][0] for found in ranks)
        # Gradients to the owner and new values from it; shards' values before the step too, where no rank has all.
        assert sent == times * STEPS * ranks[0][strategy][1], strategy
