"""Schedules of the learning rate equal torch's where torch has them, and follow samples in all cases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from dlo_framework.errors import DloError
from dlo_plugins.schedules.lr_curves import WSD, Cyclic, OneCycle, Rewarm, WarmRestarts, decay_factor
from support.trainers import quiet_trainer

STEPS = 24


class Regression(LightningModule):
    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        super().__init__()
        self.layer, self.kind = torch.nn.Linear(2, 1), optimizer
        self.rates: list[float] = []
        self.momenta: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        group = optimizer.param_groups[0]
        self.rates.append(group["lr"])
        self.momenta.append(group["betas"][0] if "betas" in group else group["momentum"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if self.kind is torch.optim.SGD else {}
        return self.kind(self.parameters(), lr=0.1, **more)


def train(*callbacks: Callback, module: Regression | None = None, ckpt: Any = None, **options: Any) -> Any:
    module = module or Regression()
    data = torch.utils.data.TensorDataset(torch.ones(STEPS // 2, 2))
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 2, **options})
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1), ckpt_path=ckpt)
    return module, trainer


def torch_rates(make: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    schedule, rates = make(optimizer), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(("cycles", "ratio", "first"), [(4, 1.0, 6), (3, 1.0, 8), (2, 2.0, 8)])
def test_warm_restarts_are_torchs(cycles, ratio, first):
    module, _ = train(WarmRestarts(cycles=cycles, ratio=ratio, final=0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
    expected = torch_rates(lambda optimizer: schedule(optimizer, first, int(ratio), eta_min=0.001))
    assert module.rates == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("mode", ["triangular", "triangular2"])
def test_cycles_are_torchs(mode):
    module, _ = train(Cyclic(cycles=3, low=0.2, mode=mode, momentum=(0.95, 0.85)))
    make = lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.02, 0.1, step_size_up=4, mode=mode, base_momentum=0.85, max_momentum=0.95
    )
    assert module.rates == pytest.approx(torch_rates(make), abs=1e-9)
    assert module.momenta[0] == pytest.approx(0.95)
    assert module.momenta[4] == pytest.approx(0.85)


def test_exponential_cycles_are_torchs():
    module, _ = train(Cyclic(cycles=3, low=0.2, mode="exp_range", gamma=0.99))
    gamma = 0.99 ** (100 / STEPS)  # per step
    make = lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.02, 0.1, step_size_up=4, mode="exp_range", gamma=gamma, cycle_momentum=False
    )
    assert module.rates == pytest.approx(torch_rates(make), abs=1e-9)


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.55), ("cosine", 0.55), ("exponential", math.sqrt(0.1))])
def test_wsd_rises_stays_and_falls(shape, half):
    schedule = WSD(warmup=0.1, decay=0.4, final=0.1, shape=shape)
    points = [0.0, 0.05, 0.1, 0.35, 0.6, 0.8, 1.0]
    assert [schedule.lr_factor(at) for at in points] == pytest.approx([0, 0.5, 1, 1, 1, half, 0.1])


def test_wsd_falls_by_the_root_by_default():
    assert WSD().lr_factor(0.8 + 0.2 * 0.25) == pytest.approx(0.5)
    assert decay_factor(0.25, 0.1, "sqrt") == pytest.approx(0.55)


def test_rewarming_begins_where_the_last_phase_ended():
    schedule = Rewarm(points=[0.0, 0.5], warmup=0.2, final=0.1, peak_decay=0.5)
    points = [0.0, 0.05, 0.1, 0.3, 0.5 - 1e-6, 0.5, 0.6, 1.0]
    assert [schedule.lr_factor(at) for at in points] == pytest.approx(
        [0.1, 0.55, 1, 0.55, 0.1, 0.1, 0.5, 0.1], abs=1e-4
    )


@pytest.mark.parametrize("make", [WSD, WarmRestarts, Cyclic, lambda: Rewarm(points=[0.0, 0.4]), lambda: OneCycle(0.1)])
def test_accumulation_and_a_resume_do_not_shift_it(tmp_path: Path, make):
    schedule = make()
    whole, _ = train(schedule, accumulate_grad_batches=2)
    assert len(set(whole.rates)) > 3
    assert whole.rates == pytest.approx([0.1 * schedule.lr_factor(2 * step / STEPS) for step in range(STEPS // 2)])
    part, trainer = train(make(), accumulate_grad_batches=2, max_steps=6)
    trainer.save_checkpoint(tmp_path / "part.ckpt")
    # The fraction of the shorter limit counts while it is the larger one.
    rest, _ = train(make(), accumulate_grad_batches=2, ckpt=tmp_path / "part.ckpt")
    assert rest.rates == pytest.approx(whole.rates[6:])
    assert part.rates[0] == pytest.approx(whole.rates[0])


def test_adams_first_beta_is_the_momentum():
    module, _ = train(Cyclic(momentum=(0.95, 0.85)), module=Regression(torch.optim.Adam))
    assert (min(module.momenta), max(module.momenta)) == pytest.approx((0.85, 0.95))


def test_two_schedules_are_refused():
    with pytest.raises(DloError, match="WSD: one callback must set the learning rate, got OneCycle too"):
        train(WSD(), OneCycle(0.1))
