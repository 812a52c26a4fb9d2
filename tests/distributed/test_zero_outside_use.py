"""Stage 3 and steps that use a block's weights outside the block: they are found, gathered, and right."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_framework.local_memory import memory_of
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.user_code import OutsideUse
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import WIDTH, Module, alone, differ, found_by, mine, of, trainer


def penalty(weights: Any) -> Tensor:
    return 0.01 * torch.stack([weight.square().sum() for weight in weights]).sum()


class AllPenalised(Module):
    """A penalty on all weights."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + penalty(self.parameters())


class OnePenalised(Module):
    """A penalty on one block's; of the other only what needs no values is asked."""

    def loss(self, batch: Any) -> Tensor:
        other = self.net.blocks[0].one.weight
        assert other.shape == other.size()
        assert (other.numel(), other.dtype, other.requires_grad) == (9 * WIDTH, torch.float32, True)
        return penalty(self.net.blocks[1].parameters()) + super().loss(batch)


class ByHand(AllPenalised):
    """Two backward passes a step, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Module.loss(self, batch))
        self.manual_backward(penalty(self.parameters()))
        optimizer.step()


def _each(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found = {}
    for kind in (Module, AllPenalised, OnePenalised, ByHand):
        run, module = trainer(world, ZeroStrategy(3), max_epochs=2, limit_val_batches=1), kind()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.fit(module, mine(rank, world), mine(rank, world))
        said = [str(warning.message) for warning in told if "ZeRO stage 3" in str(warning.message)]
        kept = [unit.name for unit in run.strategy.engine.gathering.units if unit.kept]
        resting = sum(group.full.untyped_storage().nbytes() for group in run.strategy.engine.groups)
        weights = gather_full_weights(run)
        found[kind.__name__] = (differ(weights, alone(kind(), epochs=2)) if rank == 0 else 0.0, kept, said, resting)
    return found


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by((_each,), rank, world, folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("outside"), timeout=280)


def test_what_a_step_uses_outside_its_block_is_kept_for_the_step(ranks: list[dict[str, Any]]) -> None:
    blocks = ["net.blocks.0", "net.blocks.1"]
    expected = {"Module": [], "AllPenalised": blocks, "OnePenalised": blocks[1:], "ByHand": blocks}
    for rank, found in enumerate(of(ranks, "_each")):
        for name, (difference, kept, said, resting) in found.items():
            assert difference < 1e-6, name
            assert kept == expected[name], name
            assert resting == 0, name  # Between steps nothing is gathered.
            assert len(said) == (rank == 0 and bool(kept)), name
            assert not said or all(block in said[0] for block in kept)


def test_only_what_needs_values_counts_as_use() -> None:
    weight, seen = nn.Parameter(torch.ones(3, 3)), []
    with OutsideUse({id(weight)}, lambda number, by_data: seen.append((number, by_data))):
        weight.shape, weight.dtype, weight.device, weight.grad, weight.requires_grad, weight.numel(), weight.size(0)
        weight.requires_grad_()
        weight.grad = None
        torch.ones(3, 3).sum()
        assert memory_of([weight]) == 9 * 4  # StateReport asks it amid a step by hand with two optimizers.
        assert seen == []
        for use in (lambda: weight.sum(), lambda: weight.data, lambda: weight.T, lambda: torch.stack([weight, weight])):
            seen.clear()
            use()
            assert seen[0] == (id(weight), use.__code__.co_names[-1] == "data")
        seen.clear()
        nn.functional.linear(torch.ones(2, 3), weight=weight)
        assert seen
