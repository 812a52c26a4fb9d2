import math

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dlo_framework.errors import DloError
from dlo_plugins.schedules.lr_curves import OneCycle, find_schedulers, group_peaks
from support.trainers import quiet_trainer


class Regression(LightningModule):
    """Two parameter groups, SGD with momentum; remembers lr and momentum of each optimizer step."""

    def __init__(self, scheduler: bool = False, lrs: tuple[float, float] = (0.1, 0.01)) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        self.scheduler, self.lrs = scheduler, lrs
        self.seen: list[tuple[float, float, float]] = []

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch[0])).square().mean()

    def on_before_optimizer_step(self, optimizer):
        first, second = optimizer.param_groups
        self.seen.append((first["lr"], second["lr"], first["momentum"]))

    def configure_optimizers(self):
        groups = [
            {"params": self.first.parameters(), "lr": self.lrs[0]},
            {"params": self.second.parameters(), "lr": self.lrs[1]},
        ]
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        if self.scheduler:
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
        return optimizer


def train(callback, module=None, folder=None, batches=12, **options):
    module = module or Regression()
    data = DataLoader(TensorDataset(torch.randn(batches * 2, 3)), batch_size=2)
    trainer = quiet_trainer(callbacks=[callback], **{"max_epochs": 2, **options})
    trainer.fit(module, data)
    return module, trainer


def torchs(steps: int, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, **options)
    values = []
    for step in range(steps):
        values.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        if step < steps - 1:
            schedule.step()
    return values


@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize("anneal", ["cos", "linear"])
def test_the_torch_preset_is_torchs_schedule(anneal, three_phase):
    module, _ = train(OneCycle(0.1, preset="torch", anneal=anneal, three_phase=three_phase))
    expected = torchs(24, anneal_strategy=anneal, three_phase=three_phase)
    assert len(module.seen) == 24
    for (lr, _, momentum), (expected_lr, expected_momentum) in zip(module.seen, expected, strict=True):
        assert lr == pytest.approx(expected_lr, abs=1e-12, rel=0)
        assert momentum == pytest.approx(expected_momentum, abs=1e-12, rel=0)


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
    for step, (lr, _, momentum) in enumerate(module.seen):
        expected_lr, expected_momentum = fastais(step / 24, 0.1)
        assert lr == pytest.approx(expected_lr, abs=1e-12, rel=0)
        assert momentum == pytest.approx(expected_momentum, abs=1e-12, rel=0)


def test_a_single_maximum_keeps_the_groups_ratio_and_a_list_sets_each():
    module, _ = train(OneCycle(1.0))
    highest = max(module.seen)
    assert highest[0] == pytest.approx(1.0)
    assert highest[1] == pytest.approx(0.1)
    assert group_peaks([0.1, 0.01], [3.0, 4.0]) == [3.0, 4.0]
    assert group_peaks([0.1, 0.01], None) == [0.1, 0.01]


def test_it_refuses_another_scheduler_by_name():
    with pytest.raises(DloError, match=r"Regression must configure no scheduler, .* got StepLR; remove one of them"):
        train(OneCycle(0.1), Regression(scheduler=True))


class Cosine(Regression):
    """Asks the trainer for the number of its steps, as Lightning's documentation does."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Values(Regression):
    def configure_optimizers(self):
        lr = float(self.first.weight.detach().sum())  # A fake tensor has no values.
        return [torch.optim.SGD(self.parameters(), lr=lr)], [None]


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Regression(), []),
        (Regression(scheduler=True), ["StepLR"]),
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


def test_it_refuses_a_training_without_an_end():
    with pytest.raises(DloError, match="must be set for a schedule, got neither"):
        train(OneCycle(0.1), max_epochs=-1)


def test_a_list_of_the_wrong_length_is_refused():
    with pytest.raises(DloError, match="each of the 2 parameter groups, got 3"):
        train(OneCycle([0.1, 0.2, 0.3]))


class Stream(IterableDataset):
    """Does not say how long it is."""

    def __iter__(self):
        return iter(torch.randn(8, 3).split(1))


def test_a_loader_without_a_length_needs_the_end_in_steps():
    def rates(**options):
        module = Regression()
        trainer = quiet_trainer(callbacks=[OneCycle(max_lr=0.1)], **options)
        trainer.fit(module, DataLoader(Stream(), batch_size=2))
        return [seen[0] for seen in module.seen]

    with pytest.raises(DloError, match=r"no length; set trainer\.max_steps, or trainer\.limit_train_batches"):
        rates(max_epochs=2)
    cycle = rates(max_epochs=2, max_steps=8)
    assert len(set(cycle)) > 6
    assert rates(max_epochs=2, limit_train_batches=4) == pytest.approx(cycle)
    assert rates(max_epochs=0) == []
