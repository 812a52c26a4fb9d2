import json
import math
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.stop import GracefulStop, RunStopped
from dlo_plugins.schedules import lr_finder
from dlo_plugins.schedules.lr_curves import OneCycle
from dlo_plugins.schedules.lr_finder import (
    SUGGESTIONS,
    LRFinder,
    Sweep,
    find_doubts,
    set_learning_rate,
    slide,
    steep,
    sweep_rates,
    valley,
)
from support.named_sets import isolate_named_sets
from support.noisy_data import Noisy
from support.runs import Losses
from support.trainers import quiet_trainer


@pytest.fixture(autouse=True)
def few_pictures(request, monkeypatch):
    """Draws no curve but in the test of the report: that takes as long as a run."""
    if request.node.name != "test_the_report":
        monkeypatch.setattr(lr_finder, "draw_sweep", lambda *_: Figure())


class Data(ResumableDataModule):
    def __init__(self, ours: bool = True) -> None:
        super().__init__(batch_size=4, num_workers=0, seed=3)
        self.ours = ours

    def train_dataloader(self):
        return self.train_loader(Noisy()) if self.ours else DataLoader(Noisy(), batch_size=4, shuffle=True)


class Net(LightningModule):
    """Two parameter groups, dropout and batch norm; remembers the rates of each optimizer step."""

    def __init__(self, schedule=None, lrs: tuple[float, float] = (0.02, 0.01)) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3))
        self.second = torch.nn.Linear(16, 3)
        self.schedule, self.lrs, self.rates = schedule, lrs, Rates()

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.second(self.first(batch[0])), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.rates.steps += 1
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.rates.seen.append([group["lr"] for group in optimizer.param_groups])

    def configure_optimizers(self):
        groups = [
            {"params": self.first.parameters(), "lr": self.lrs[0]},
            {"params": self.second.parameters(), "lr": self.lrs[1]},
        ]
        optimizer = torch.optim.AdamW(groups)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}


class Rates:
    """What must not be put back: an object that no snapshot looks into."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.steps = 0


def fit(folder, *callbacks, make=Net, data=None, logger=False, ckpt_path=None, **options):
    """Returns the losses that training saw, the module and the trainer."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    module, losses = make(), Losses()
    options = {"max_epochs": 2, "logger": logger, "default_root_dir": folder, **options}
    trainer = quiet_trainer(callbacks=[*callbacks, losses], **options)
    trainer.fit(module, datamodule=data or Data(), ckpt_path=ckpt_path)
    return losses.found, module, trainer


@pytest.mark.parametrize(("ours", "accumulate"), [(True, 3), (False, 1)])
def test_training_is_bit_for_bit_that_without_the_finder(tmp_path, ours, accumulate):
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
    expected, _, _ = fit(tmp_path, data=Data(ours), **options)
    finder = LRFinder(num_steps=25, apply=False)
    found, module, trainer = fit(tmp_path, finder, data=Data(ours), **options)
    assert found == expected
    assert finder.lr is not None
    assert trainer.global_step == 2 * math.ceil(7 / accumulate)
    assert module.rates.steps == 25 * accumulate + len(expected)


def test_the_rate_is_set_for_all_groups_in_their_ratio(tmp_path, capsys):
    finder = LRFinder(num_steps=30)
    _, module, _ = fit(tmp_path, finder)
    swept, trained = module.rates.seen[:-14], module.rates.seen[-14:]
    for rates, expected in zip(swept, sweep_rates(1e-7, 10, 30), strict=False):
        assert rates == pytest.approx([expected, expected / 2])
    assert trained == [pytest.approx([finder.lr, finder.lr / 2])] * 14
    assert finder.lr == finder.suggestions["minimum"]
    assert f"minimum  {finder.lr:.3g} <- used" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "given", "ratio"), [(True, None, 0.5), (False, 1e-3, 0.5), (False, [1e-3, 1e-4], 0.1)]
)
def test_one_cycle_takes_it_as_its_maximum_in_either_order(tmp_path, first, given, ratio):
    finder, cycle = LRFinder(num_steps=30), OneCycle(given)
    _, module, _ = fit(tmp_path, *((finder, cycle) if first else (cycle, finder)), max_epochs=4)
    trained = module.rates.seen[-28:]
    assert max(trained)[0] == pytest.approx(finder.lr)
    assert max(trained)[1] == pytest.approx(finder.lr * ratio)
    assert trained[0][0] == pytest.approx(finder.lr / 25)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))


def two_parts(optimizer):
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 3), torch.optim.lr_scheduler.StepLR(optimizer, 5)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


@pytest.mark.parametrize(
    "schedule",
    [
        warm_up,  # whose rate at the start is 0
        two_parts,
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.01], total_steps=28),
    ],
    ids=["lambda", "sequential", "one-cycle"],
)
def test_a_scheduler_follows(tmp_path, schedule):
    """The schedule is the one of a run that was configured with the rate that was found."""
    _, alone, _ = fit(tmp_path, make=lambda: Net(schedule))
    finder = LRFinder(num_steps=30, suggestion="steep")
    _, module, _ = fit(tmp_path, finder, make=lambda: Net(schedule))
    trained = torch.tensor(module.rates.seen[-14:])
    torch.testing.assert_close(trained, torch.tensor(alone.rates.seen) * (finder.lr / 0.02))
    swept = module.rates.seen[0]
    assert swept == pytest.approx([1e-7, 5e-8])


def test_rates_that_are_tensors_are_set_in_place():
    parameter = torch.nn.Parameter(torch.zeros(1))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([parameter], lr=rate, capturable=False)

    class Only:
        optimizers, lr_scheduler_configs, callbacks = [optimizer], [], []

    set_learning_rate(Only(), 0.3)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.3)


def test_the_sweep_of_a_quadratic_ends_where_gradient_descent_diverges(tmp_path):
    """For losses x'Ax/2, descent diverges above 2 over A's largest eigenvalue: 0.2 here."""

    class Quadratic(LightningModule):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.ones(2))

        def training_step(self, batch, batch_idx):
            return (torch.tensor([10.0, 1.0]) * self.x.square()).sum() / 2

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    finder = LRFinder(min_lr=1e-4, max_lr=10, beta=0.5, suggestion="steep")
    fit(tmp_path, finder, make=Quadratic, data=Data(ours=False))
    report = json.loads((tmp_path / "lr_find.json").read_text())
    assert 0.2 < report["points"][-1]["lr"] < 2
    assert "above 4 x" in report["stopped"]
    assert all(1e-3 < rate < 0.25 for rate in report["suggestions"].values())
    assert report["lr"] == finder.lr == report["suggestions"]["steep"]


def test_the_report(tmp_path):
    class Direct(Net):
        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_scalar("direct", 1.0, self.trainer.global_step)
            return super().training_step(batch, batch_idx)

    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(tmp_path, LRFinder(num_steps=30), make=Direct, logger=logger, log_every_n_steps=1)
    folder = tmp_path / "run"
    report = json.loads((folder / "lr_find.json").read_text())
    assert [point["lr"] for point in report["points"]] == pytest.approx(
        sweep_rates(1e-7, 10, 30)[: len(report["points"])]
    )
    assert report["applied"] is True
    assert (folder / "lr_find.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(folder))
    events.Reload()
    assert events.Tags()["images"] == ["lr_find"]
    for tag in ("train_loss_step", "direct"):  # The sweep logs nothing.
        assert [event.step for event in events.Scalars(tag)] == list(range(14))


@pytest.mark.parametrize(("error", "raised"), [(ValueError, ValueError), (KeyboardInterrupt, SystemExit)])
def test_nothing_is_logged_and_nothing_is_left_where_the_sweep_fails(tmp_path, error, raised):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if self.rates.steps == 7:
                raise error("in the sweep")
            return super().training_step(batch, batch_idx)

    with pytest.raises(raised):
        fit(tmp_path, LRFinder(), make=Fails, logger=CSVLogger(tmp_path, name="", version="run"))
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "hparams" not in path.name] == []


@pytest.mark.parametrize(("step", "message"), [(7, "before the first step"), (20, "at step 1")])
def test_a_run_is_stopped_within_the_sweep(tmp_path, step, message):
    """What comes in the last of its 20 steps is not forgotten with the rest of the sweep."""

    class Asked(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.rates.steps == step:
                signal.raise_signal(signal.SIGTERM)
            return loss

    module: list[Net] = []
    stop = GracefulStop(tmp_path / "checkpoints")
    finder = LRFinder(num_steps=20, max_lr=1e-3)
    with pytest.raises(RunStopped, match=message) as stopped:
        fit(tmp_path, finder, stop, make=lambda: module.append(Asked()) or module[0], enable_checkpointing=True)
    assert stopped.value.exit_code == 143
    assert module[0].rates.steps == (7 if step == 7 else 21)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists() == (step == 20)
    assert (tmp_path / "lr_find.json").exists() == (step == 20)


def test_a_resumed_run_does_not_sweep_again(tmp_path):
    finder = LRFinder(num_steps=30)
    whole, _, _ = fit(tmp_path, finder, OneCycle(), max_epochs=4)
    _, _, trainer = fit(tmp_path, LRFinder(num_steps=30), OneCycle(), max_epochs=4, limit_train_batches=7, max_steps=14)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    again = LRFinder(num_steps=30)
    torch.load(tmp_path / "half.ckpt", weights_only=True)
    _, module, _ = fit(tmp_path, again, OneCycle(), max_epochs=4, ckpt_path=tmp_path / "half.ckpt")
    assert again.lr == finder.lr
    assert module.rates.steps == 14
    assert max(module.rates.seen)[0] < finder.lr
    assert len(whole) == 28


def test_a_loss_that_diverges_at_once_is_told(tmp_path):
    class Wild(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 10.0**self.rates.steps

    with pytest.raises(DloError, match=r"got \d+ steps up to lr .*; set min_lr: 1e-10"):
        fit(tmp_path, LRFinder(), make=Wild)
    assert (tmp_path / "lr_find.png").exists(), "the curve shows why"


@pytest.mark.parametrize("suggestion", ["raises_at_each_curve", "minimum"])
def test_a_suggestion_that_raises_leaves_the_report_of_the_sweep(tmp_path, capsys, monkeypatch, suggestion):
    isolate_named_sets(monkeypatch)

    @SUGGESTIONS.register("raises_at_each_curve")
    def raises(rates, losses):
        raise KeyError("x")

    message = "suggestion raises_at_each_curve must return a positive rate or None, got KeyError: 'x'; correct"
    chosen = suggestion != "minimum"
    with pytest.raises(DloError, match=message) if chosen else pytest.warns(UserWarning, match=message):
        fit(tmp_path, LRFinder(num_steps=30, suggestion=suggestion))
    found = json.loads((tmp_path / "lr_find.json").read_text())["suggestions"]
    lines = capsys.readouterr().out.splitlines()
    assert f"  {'raises_at_each_curve':<22}none" in lines
    assert f"  {'minimum':<22}{found['minimum']:.3g}{'' if chosen else ' <- used'}" in lines
    assert f"  {'curve':<22}{tmp_path / 'lr_find.png'}" in lines


def fed(losses, **options):
    sweep = Sweep(**{"steps": 100, "beta": 0.0, **options})
    for number, loss in enumerate(losses):
        if not sweep.add(10.0**number, loss):
            break
    return sweep


def test_it_stops_above_four_times_the_best_at_nan_and_infinity_and_at_its_last_step():
    assert fed([2.0, 1.0, 4.0, 4.001, 1.0]).losses == [2.0, 1.0, 4.0, 4.001]
    assert "above 4 x 1" in fed([2.0, 1.0, 4.001]).stopped
    assert fed([2.0, 1.0, 3.0, 3.1, 1.0], stop_factor=3.0).losses[-1] == 3.1
    assert fed([1.0, math.nan, 1.0]).stopped == "the loss became nan"
    assert fed([1.0, math.inf, 1.0]).stopped == "the loss became inf"
    whole = fed([1.0] * 10, steps=4)
    assert (len(whole.losses), whole.stopped) == (4, None)


RATES = sweep_rates(1e-6, 1, 61)  # ten a decade
FALLING = [3.0] * 15 + [3.0 - 0.2 * step for step in range(15)] + [9.0] * 11


@pytest.mark.parametrize(
    ("losses", "used", "others", "reason"),
    [
        (FALLING, 20, (10, 25), ""),
        (FALLING, 20, (4, 35), ""),  # The first rate that counts: only noise put it there.
        (FALLING, 20, (9, 34), "the suggestions differ by a factor of 316: compare short runs"),
        (FALLING, 4, (), "it is at an end of the sweep: use another suggestion"),
        ([2.0] * 41, 20, (), "the loss fell by 0, and scatters by 0: use a larger batch"),
        ([3.0 - 0.05 * step for step in range(41)], 20, (), "the loss still fell at the highest rate: raise max_lr"),
    ],
)
def test_a_suggestion_that_is_not_to_be_trusted_says_why(losses, used, others, reason):
    sweep = Sweep(41, rates=RATES[:41], losses=losses, smoothed=losses)
    found = find_doubts(sweep, {str(at): RATES[at] for at in (used, *others)}, RATES[used])
    assert found.startswith(reason) if reason else found == ""


def published_valley(losses):
    """fastai's definition in other words: the index that its two nested loops arrive at."""
    count = len(losses)
    length, end, start = [1] * count, 0, 0
    for i in range(count):
        length[i] = 1 + max([length[j] for j in range(i) if losses[i] < losses[j]], default=0)
        if length[i] > length[end]:
            end, start = i, i - length[i]
    return start + int((end - start) / 3) + int((end - start) / 6)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_valley_is_the_published_one(losses):
    found = valley(RATES[: len(losses)], losses)
    if found is None:
        assert losses == sorted(losses)
    else:
        assert found == RATES[max(0, published_valley(losses))]


def test_steep_is_where_the_logistic_curve_falls_fastest():
    losses = [1 / (1 + math.exp(2 * (math.log10(rate) + 3.04))) for rate in RATES]
    assert steep(RATES, losses) == pytest.approx(1e-3, rel=0.3)
    assert steep(RATES, losses) == RATES[29]


def published_slide(rates, losses):
    """fastai's definition in other words, with indices from the end."""
    slopes, edge = np.gradient(np.array(losses)), 1
    found = rates[-16]
    while edge + 15 <= len(losses) and abs(slopes[-edge] - slopes[-edge - 15]) > 0.005:
        found = rates[-edge - 15]
        edge += 1
    return found


@given(st.lists(st.floats(0, 1), min_size=16, max_size=40))
def test_slide_is_the_published_one(losses):
    rates = RATES[: len(losses)]
    assert slide(rates, losses) == published_slide(rates, losses)
