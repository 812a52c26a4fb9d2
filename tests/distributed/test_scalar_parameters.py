"""A model with a parameter that has no dims (CLIP's temperature, a gate): trained, saved, and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
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


class Summed(Tempered):
    """Steps with an optimizer whose constructor makes state, where torch's Adagrad needs it in its step (2.11)."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.02, initial_accumulator_value=0.1)


class Copying(torch.optim.SGD):
    """Makes state in its constructor that differs among a tensor's elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["first"] = parameter.detach().clone()


class Copied(Module):
    def configure_optimizers(self) -> Any:
        return Copying(self.parameters())


def _copied(rank: int, world: int, folder: Path) -> list[str]:
    told = []
    for name in ("zero1", "fsdp"):
        with pytest.raises(DloError) as error:
            trainer(world, STRATEGIES[name]()).fit(Copied(), mine(rank, world))
        told.append(str(error.value))
    return told


def _summed(rank: int, world: int, folder: Path) -> dict[str, float]:
    expected, found = alone(Summed(), epochs=2), {}
    for first, then in zip(STRATEGIES, [*list(STRATEGIES)[1:], "ddp"], strict=True):
        for name, epochs, path in ((first, 1, None), (then, 2, folder / f"{first}.ckpt")):
            run = trainer(world, STRATEGIES[name](), max_epochs=epochs)
            run.fit(Summed(), mine(rank, world), ckpt_path=path)
            run.save_checkpoint(folder / f"{name}.ckpt")
        weights = gather_full_weights(run)
        found[f"{first}, then {then}"] = differ(weights, expected) if rank == 0 else 0.0
        held = sum(value.numel() for o in run.optimizers for state in o.state.values() for value in state.values())
        found[f"{then}, elements of state"] = held
    return found


def _each(rank: int, world: int, folder: Path) -> dict[str, float]:
    expected, found = alone(Tempered(), epochs=2), {}
    for first in STRATEGIES:
        run = trainer(world, STRATEGIES[first](), max_epochs=1)
        run.fit(Tempered(), mine(rank, world))
        run.save_checkpoint(folder / f"{first}.ckpt")
        for then in STRATEGIES:
            run = trainer(world, STRATEGIES[then](), max_epochs=2)
            run.fit(Tempered(), mine(rank, world), ckpt_path=folder / f"{first}.ckpt")
            weights = gather_full_weights(run)
            found[f"{first}, then {then}"] = differ(weights, expected) if rank == 0 else 0.0
    return found


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by((_each, _summed, _copied), rank, world, folder / "each")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("ranks"), timeout=280)


def test_any_strategy_goes_on_from_any_other(ranks: list[dict[str, Any]]) -> None:
    differences = of(ranks, "_each")[0]
    assert len(differences) == len(STRATEGIES) ** 2
    assert differences == pytest.approx(dict.fromkeys(differences, 0.0), abs=1e-6)


def test_state_that_an_optimizers_constructor_makes_is_divided_with_the_parameters(ranks: list[dict[str, Any]]) -> None:
    one, other = of(ranks, "_summed")
    names = [name for name in one if ", then" in name]
    assert len(names) == len(STRATEGIES)
    assert {name: one[name] for name in names} == pytest.approx(dict.fromkeys(names, 0.0), abs=1e-6)
    for held in (one, other):
        for name in ("zero1", "zero3", "fsdp"):
            assert held[f"{name}, elements of state"] <= 0.6 * held["ddp, elements of state"]


def test_state_of_a_constructor_that_cannot_be_divided_is_refused(ranks: list[dict[str, Any]]) -> None:
    for told in of(ranks, "_copied")[0]:
        assert "must be made in its first step, or be one value a tensor, got 'first' of '" in told
        assert told.endswith("from Copying's constructor; make it in step()")
