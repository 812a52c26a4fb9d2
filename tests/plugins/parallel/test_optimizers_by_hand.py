"""Several optimizers stepped by hand, and never toggled: each one's gradients are its own, under every strategy."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from timm.optim import Lamb
from torch import Tensor, nn

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import WIDTH, data, differ, found_by, mine, of, trainer

STRATEGIES = {
    "zero2": lambda: ZeroStrategy(2),
    "zero3": lambda: ZeroStrategy(3),
    "fsdp": FSDPStrategy,
    "ddp": DataParallelStrategy,
}


class TwoTasks(LightningModule):
    """A body with two heads, and a probe of what the body has learned: four optimizers, three losses.

    The body's gradient is the sum of two backward passes, the probe's comes from a third, and the slow head gathers
    for two steps what the others use at once.
    """

    whole = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.one, self.slow, self.probe = (nn.Linear(WIDTH, WIDTH + more) for more in (0, 1, 2, 3))
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        kind: Any = (lambda p: Lamb(p, lr=0.05)) if self.whole else (lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-5))
        return [
            kind(self.body.parameters()),
            torch.optim.SGD(self.one.parameters(), lr=0.1, momentum=0.5),
            kind(self.slow.parameters()),
            torch.optim.SGD(self.probe.parameters(), lr=0.1),
        ]

    def take_step(self, batch: Any, number: int, optimizers: Any, backward: Any) -> None:
        body, one, slow, probe = optimizers
        x, y = batch
        code = torch.tanh(self.body(x))
        body.zero_grad()
        one.zero_grad()
        if number % 2 == 0:
            slow.zero_grad()
        backward(nn.functional.cross_entropy(self.one(code), y), True)
        backward(self.slow(code).square().mean(), False)
        body.step()
        one.step()
        if number % 2 == 1:
            slow.step()
        backward(nn.functional.cross_entropy(self.probe(code.detach()), y), False)
        probe.step()
        probe.zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def backward(loss: Tensor, retain: bool) -> None:
            self.manual_backward(loss, retain_graph=retain)

        self.take_step(batch, batch_idx, self.optimizers(), backward)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.body(batch[0])

    def alone(self) -> dict[str, Tensor]:
        optimizers = self.configure_optimizers()
        for number, batch in enumerate(data()):
            if number == 2:
                self.zero_grad()
            self.take_step(batch, number, optimizers, lambda loss, retain: loss.backward(retain_graph=retain))
        return self.state_dict()


class WholeTensors(TwoTasks):
    """Likewise, with optimizers that need whole tensors."""

    whole = True


class Toggled(TwoTasks):
    """One optimizer's parameters alone are set to train for a second backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.one(self.body(batch[0])).square().mean())
        self.toggle_optimizer(self.optimizers()[3])
        self.manual_backward(self.probe(batch[0]).square().mean())


class Adversaries(LightningModule):
    """A generator and a discriminator that is toggled, as in Lightning's example of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator, self.critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            made = self.generator(torch.ones_like(batch[0]))
            loss = -self.critic(made) if number == 0 else self.critic(made.detach()) - self.critic(batch[0])
            optimizer.zero_grad()
            self.manual_backward(loss.mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def a_gan_trains_under_ddp_with_a_warning(rank: int, world: int, folder: Path) -> None:
    alone = Adversaries()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Adversaries()
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        run = trainer(world, DataParallelStrategy())
        run.fit(module, mine(rank, world))
    trained = {name: p for name, p in module.named_parameters() if name.endswith("weight")}  # A bias cancels out.
    assert all(differ({name: p}, {name: before[name]}) > 1e-3 for name, p in trained.items())
    generator, critic = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (alone.generator, alone.critic))
    for x, _ in data():
        for number, optimizer in enumerate((generator, critic)):
            made = alone.generator(torch.ones_like(x))
            loss = -alone.critic(made) if number == 0 else alone.critic(made.detach()) - alone.critic(x)
            alone.zero_grad()
            loss.mean().backward()
            optimizer.step()
    assert differ(dict(module.named_parameters()), dict(alone.named_parameters())) < 1e-6
    assert rank or any("Adversaries optimizes by hand" in str(one.message) for one in caught)


def each_optimizer_steps_what_was_gathered_for_it(rank: int, world: int, folder: Path) -> None:
    for kind in (TwoTasks, WholeTensors):
        expected = kind().alone()
        for name, strategy in STRATEGIES.items():
            # A validation after each second step: Lightning calls the module's own zero_grad before it.
            run, module = trainer(world, strategy(), limit_val_batches=1, val_check_interval=2), kind()
            run.fit(module, mine(rank, world), mine(rank, world))
            weights = gather_full_weights(run)
            assert rank or differ(weights, expected) < 1e-6, (kind, name)


def plain_data_parallelism_names_parameters_without_a_gradient(rank: int, world: int, folder: Path) -> None:
    """It wants all gradients in each backward where it is told not to look for them."""
    for kind in (TwoTasks, Toggled):
        with pytest.raises(DloError) as error:
            trainer(world, DataParallelStrategy(find_unused_parameters=False)).fit(kind(), mine(rank, world))
        assert "got none for slow.weight, slow.bias, probe.weight, probe.bias" in str(error.value)
        assert "ddp_find_unused_parameters_true" in str(error.value)


CHECKS = (
    each_optimizer_steps_what_was_gathered_for_it,
    plain_data_parallelism_names_parameters_without_a_gradient,
    a_gan_trains_under_ddp_with_a_warning,
)


def _ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return found_by(CHECKS, rank, world, folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_ranks, 2, tmp_path_factory.mktemp("by_hand"), timeout=280)


@pytest.mark.parametrize("check", CHECKS)
def test_it_holds_on_two_ranks(ranks: list[dict[str, Any]], check: Any) -> None:
    of(ranks, check.__name__)
