"""Stage 3 and steps that use a block's weights outside the block: they are found, gathered, and right."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.local_memory import memory_of
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.user_code import OutsideUse
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import WIDTH, Module, alone, differ, mine, trainer


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


BLOCKS = ["net.blocks.0", "net.blocks.1"]
#: Which blocks each module's steps use outside of them.
USED = {Module: [], AllPenalised: BLOCKS, OnePenalised: BLOCKS[1:], ByHand: BLOCKS}


def _each(rank: int, world: int) -> None:
    for kind, used in USED.items():
        run, module = trainer(world, ZeroStrategy(3), max_epochs=2, limit_val_batches=1), kind()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.fit(module, mine(rank, world), mine(rank, world))
        said = [str(warning.message) for warning in told if "ZeRO stage 3" in str(warning.message)]
        assert [unit.name for unit in run.strategy.engine.gathering.units if unit.kept] == used, kind
        resting = sum(group.full.untyped_storage().nbytes() for group in run.strategy.engine.groups)
        assert resting == 0, kind  # Between steps nothing is gathered.
        assert len(said) == (rank == 0 and bool(used)), kind
        assert not said or all(block in said[0] for block in used), kind
        weights = gather_full_weights(run)
        assert rank or differ(weights, alone(kind(), epochs=2)) < 1e-6, kind


def test_what_a_step_uses_outside_its_block_is_kept_for_the_step() -> None:
    run_distributed(_each, 2)


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
