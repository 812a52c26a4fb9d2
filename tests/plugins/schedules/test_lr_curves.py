"""Schedules of the learning rate equal torch's and fast.ai's where these have them, and follow samples in all cases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dlo_framework.errors import DloError
from dlo_plugins.schedules.lr_curves import (
    WSD,
    Cyclic,
    OneCycle,
    Rewarm,
    WarmRestarts,
    decay_factor,
    find_schedulers,
    group_peaks,
)
from support.trainers import quiet_trainer

STEPS = 24


class TwoGroups(LightningModule):
    """Two parameter groups; remembers their rates and the momentum in each optimizer step."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.SGD, scheduler: bool = False) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        self.kind, self.scheduler = kind, scheduler
        self.seen: list[tuple[float, float]] = []
        self.momenta: list[float] = []

    @property
    def rates(self) -> list[float]:
        return [first for first, _ in self.seen]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.second(self.first(batch[0])).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first, second = optimizer.param_groups
        self.seen.append((first["lr"], second["lr"]))
        self.momenta.append(first["betas"][0] if "betas" in first else first["momentum"])

    def configure_optimizers(self) -> Any:
        groups = [{"params": part.parameters(), "lr": lr} for part, lr in ((self.first, 0.1), (self.second, 0.01))]
        optimizer = self.kind(groups, **({"momentum": 0.9} if self.kind is torch.optim.SGD else {}))
        return ([optimizer], [schedulers.StepLR(optimizer, 1)]) if self.scheduler else optimizer


def train(
    *callbacks: Callback, module: TwoGroups | None = None, data: Any = None, ckpt: Any = None, **options: Any
) -> tuple[TwoGroups, Trainer]:
    module = module or TwoGroups()
    data = DataLoader(TensorDataset(torch.ones(STEPS // 2, 3))) if data is None else data
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_epochs": 2, **options})
    trainer.fit(module, data, ckpt_path=ckpt)
    return module, trainer


def assert_torchs(ours: Callback, scheduler: Any, **options: Any) -> None:
    """Asserts that rates, and momenta where they cycle, are those of a scheduler of torch's."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    schedule, rates, momenta = scheduler(optimizer, **options), [], []
    for step in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        if step < STEPS - 1:
            schedule.step()
    module, _ = train(ours)
    assert module.rates == pytest.approx(rates, abs=1e-9)
    assert module.momenta == pytest.approx(momenta, abs=1e-9)


@pytest.mark.parametrize(("cycles", "ratio", "first"), [(4, 1.0, 6), (3, 1.0, 8), (2, 2.0, 8)])
def test_warm_restarts_are_torchs(cycles: int, ratio: float, first: int) -> None:
    theirs = {"T_0": first, "T_mult": int(ratio), "eta_min": 0.001}
    assert_torchs(
        WarmRestarts(cycles=cycles, ratio=ratio, final=0.01), schedulers.CosineAnnealingWarmRestarts, **theirs
    )


@pytest.mark.parametrize("mode", ["triangular", "triangular2", "exp_range"])
def test_cycles_are_torchs(mode: Any) -> None:
    theirs = {"base_lr": 0.02, "max_lr": 0.1, "step_size_up": 4, "base_momentum": 0.85, "max_momentum": 0.95}
    theirs |= {"mode": mode, "gamma": 0.99 ** (100 / STEPS)}  # per step
    ours = Cyclic(cycles=3, low=0.2, mode=mode, gamma=0.99, momentum=(0.95, 0.85))
    assert_torchs(ours, schedulers.CyclicLR, **theirs)


@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize("anneal", ["cos", "linear"])
def test_the_torch_preset_is_torchs_schedule(anneal: Any, three_phase: bool) -> None:
    theirs = {"max_lr": 0.1, "total_steps": STEPS, "anneal_strategy": anneal, "three_phase": three_phase}
    ours = OneCycle(0.1, preset="torch", anneal=anneal, three_phase=three_phase)
    assert_torchs(ours, schedulers.OneCycleLR, **theirs)


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
    module, _ = train(Cyclic(momentum=(0.95, 0.85)), module=TwoGroups(torch.optim.Adam))
    assert (min(module.momenta), max(module.momenta)) == pytest.approx((0.85, 0.95))


def fastais(fraction: float, maximum: float) -> tuple[float, float]:
    """fit_one_cycle with its defaults, from its published formula: two cosine pieces that meet at 25%."""

    def cosine(start: float, end: float, position: float) -> float:
        return start + (1 + math.cos(math.pi * (1 - position))) * (end - start) / 2

    if fraction < 0.25:
        position = fraction / 0.25
        return cosine(maximum / 25, maximum, position), cosine(0.95, 0.85, position)
    position = (fraction - 0.25) / 0.75
    return cosine(maximum, maximum / 1e5, position), cosine(0.85, 0.95, position)


def test_the_fastai_preset_is_fastais_schedule():
    module, _ = train(OneCycle(0.1))
    rates, momenta = zip(*(fastais(step / STEPS, 0.1) for step in range(STEPS)), strict=True)
    assert module.rates == pytest.approx(rates, abs=1e-12, rel=0)
    assert module.momenta == pytest.approx(momenta, abs=1e-12, rel=0)


def test_a_single_maximum_keeps_the_groups_ratio_and_a_list_sets_each():
    module, _ = train(OneCycle(1.0))
    assert max(module.seen) == pytest.approx((1.0, 0.1))
    assert group_peaks([0.1, 0.01], [3.0, 4.0]) == [3.0, 4.0]
    assert group_peaks([0.1, 0.01], None) == [0.1, 0.01]


class Cosine(TwoGroups):
    """Asks the trainer for the number of its steps, as Lightning's documentation does."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        steps = self.trainer.estimated_stepping_batches
        schedule = schedulers.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Values(TwoGroups):
    def configure_optimizers(self):
        lr = float(self.first.weight.detach().sum())  # A fake tensor has no values.
        return [torch.optim.SGD(self.parameters(), lr=lr)], [None]


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (TwoGroups(), []),
        (TwoGroups(scheduler=True), ["StepLR"]),
        (Cosine(), ["CosineAnnealingLR"]),
        (Values(), []),
    ],
)
def test_schedulers_are_found_before_ranks_start(module, found):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    weight = module.first.weight.clone()
    assert find_schedulers(module, trainer) == found
    assert module._trainer is None
    assert torch.equal(module.first.weight, weight)
    if found:
        with pytest.raises(DloError, match=f"must configure no scheduler, .* got {found[0]}"):
            OneCycle(0.1).check_run(trainer, module)


@pytest.mark.parametrize(
    ("callbacks", "module", "message"),
    [
        ([WSD(), OneCycle(0.1)], TwoGroups(), "WSD: one callback must set the learning rate, got OneCycle too"),
        ([OneCycle(0.1)], TwoGroups(scheduler=True), "must configure no scheduler, .* got StepLR"),
        ([OneCycle([0.1, 0.2, 0.3])], TwoGroups(), "each of the 2 parameter groups, got 3"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(callbacks: Any, module: TwoGroups, message: str) -> None:
    with pytest.raises(DloError, match=message):
        train(*callbacks, module=module)


class Stream(IterableDataset):
    """Does not say how long it is."""

    def __iter__(self):
        return iter(torch.randn(8, 3).split(1))


def test_a_loader_without_a_length_needs_the_end_in_steps():
    def rates(**options):
        return train(OneCycle(max_lr=0.1), data=DataLoader(Stream(), batch_size=2), **options)[0].rates

    with pytest.raises(DloError, match=r"no length; set trainer\.max_steps, or trainer\.limit_train_batches"):
        rates()
    cycle = rates(max_steps=8)
    assert len(set(cycle)) > 6
    assert rates(limit_train_batches=4) == pytest.approx(cycle)
    assert rates(max_epochs=0) == []
