"""A run that trained on the side, by every kind of loader, equals one that never did."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from dlo_framework.data import ResumableDataModule
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.rehearsal import Rehearsal, Snapshot, trial_steps
from dlo_framework.watch.monitor import RunMonitor
from support.noisy_data import BATCH, BATCHES, Noisy
from support.trainers import quiet_trainer


class Net(LightningModule):
    """Dropout, batch norm, a metric, and state in every kind of attribute; moves all of it in each step."""

    def __init__(self, fail_at: int | None = None, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)
        )
        self.accuracy = MulticlassAccuracy(3)
        self.register_buffer("mean_input", torch.zeros(6), persistent=False)
        self.plain = torch.zeros(())
        self.outputs: dict[str, list[float]] = {"train": []}
        self.own = torch.Generator().manual_seed(5)
        self.steps, self.fail_at, self.error = 0, fail_at, error

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.steps += 1
        if self.steps == self.fail_at:
            raise self.error("stopped")
        x = x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand()) + 0.1 * torch.randn(6, generator=self.own)
        self.mean_input = 0.9 * self.mean_input + 0.1 * x.mean(0)  # a new tensor in the buffer's place
        self.plain += x.mean()
        outputs = self.net(x)
        loss = torch.nn.functional.cross_entropy(outputs, y) + self.mean_input.mean() + 0.01 * self.plain
        self.accuracy(outputs, y)
        self.log("train_acc", self.accuracy, on_step=True, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.outputs["train"].append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(ResumableDataModule):
    def __init__(self) -> None:
        super().__init__(batch_size=BATCH, num_workers=0, seed=3)

    def train_dataloader(self):
        return self.train_loader(Noisy())


class Plain(ResumableDataModule):
    """Loaders as users write them, shuffled from torch's global generator."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__(batch_size=BATCH)
        self.options = {"num_workers": workers, "persistent_workers": workers > 0}

    def train_dataloader(self):
        return DataLoader(Noisy(), batch_size=BATCH, shuffle=True, **self.options)


class Aside(Callback):
    """Trains on the side for some optimizer steps at a hook, and undoes it."""

    def __init__(self, steps: int = 10, at: str = "on_train_epoch_start", batch: int = 0) -> None:
        self.steps, self.at, self.batch, self.losses = steps, at, batch, []

    def _train(self, trainer) -> None:
        place = getattr(trainer.train_dataloader, "state_dict", dict)()
        with trial_steps(trainer) as rehearsal:
            losses = [float(rehearsal.optimizer_step()) for _ in range(self.steps)]
        self.losses = losses
        assert getattr(trainer.train_dataloader, "state_dict", dict)() == place

    def on_train_epoch_start(self, trainer, pl_module):
        if self.at == "on_train_epoch_start" and trainer.current_epoch == 0:
            self._train(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.at == "on_train_batch_end" and batch_idx == self.batch and trainer.current_epoch == 0:
            self._train(trainer)


class Ends(Callback):
    """Records each batch's loss, and each epoch's metrics."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen += [float(trainer.callback_metrics[name]) for name in ("train_acc_epoch", "train_loss_epoch")]
        self.seen.append(float(sum(pl_module.outputs["train"])))


def trainer_with(callbacks, **options):
    return quiet_trainer(callbacks=callbacks, **{"max_epochs": 2, **options})


def run(*aside: Callback, data=None, make=Net, callbacks=(), **options):
    """Returns all results of a fit: losses, metrics, weights, averages, and the next random numbers."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    module, ends = make(), Ends()
    trainer = trainer_with([*aside, ends, *callbacks], **options)
    trainer.fit(module, datamodule=data or Data())
    after = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    return ends.seen, [t.tolist() for t in module.state_dict().values()], after, trainer.global_step


@pytest.mark.parametrize("data", [Data, Plain])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_is_the_one_that_never_trained_on_the_side(data, accumulate):
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    aside = Aside()
    expected = run(data=data(), callbacks=[WeightEMA(0.9)], **options)
    found = run(aside, data=data(), callbacks=[WeightEMA(0.9)], **options)
    assert found == expected
    assert len(set(aside.losses)) == 10


def test_in_the_middle_of_an_epoch_and_of_an_accumulation():
    """Gradients are half-accumulated and Adam has a state; the loader's iterator is at the fifth batch."""
    for data in (Data, Plain):
        expected = run(data=data(), accumulate_grad_batches=3)
        assert run(Aside(at="on_train_batch_end", batch=4), data=data(), accumulate_grad_batches=3) == expected


def test_it_is_put_back_where_it_raises_or_is_interrupted():
    class Survives(Aside):
        def _train(self, trainer):
            with pytest.raises((ValueError, KeyboardInterrupt), match="stopped"):
                super()._train(trainer)
            assert trainer.lightning_module.steps == 0
            trainer.lightning_module.fail_at = None

    expected = run()
    for error in (ValueError, KeyboardInterrupt):
        assert run(Survives(), make=lambda error=error: Net(4, error)) == expected


def test_the_optimizer_is_as_empty_and_the_tensors_are_the_same_objects():
    class Check(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            optimizer = trainer.optimizers[0]
            before = [*pl_module.parameters(), *pl_module.buffers()]
            values = [tensor.clone() for tensor in before]
            pl_module.net[3].bias.requires_grad_(False)
            pl_module.net[2].eval()
            snapshot = Snapshot(trainer)
            rehearsal = Rehearsal(trainer)
            rehearsal.optimizer_step()
            rehearsal.close()
            pl_module.net[2].train()
            pl_module.net[3].bias.requires_grad_(True)
            assert optimizer.state
            assert trainer.callback_metrics
            assert not torch.equal(pl_module.net[0].weight, values[0])
            snapshot.restore()
            assert not optimizer.state
            assert not trainer.callback_metrics
            assert trainer.global_step == 0
            assert not pl_module.net[2].training
            assert not pl_module.net[3].bias.requires_grad
            pl_module.net[3].bias.requires_grad_(True)
            for now, same, value in zip([*pl_module.parameters(), *pl_module.buffers()], before, values, strict=True):
                assert now is same
                assert torch.equal(now, value)
                assert now.grad is None
            trainer.should_stop = True

    trainer_with([Check()]).fit(Net(), datamodule=Data())


def test_the_scaler_of_half_precision_comes_back():
    """On a CPU the scaler halves its scale whenever float16 overflows; the state before its first step is None."""
    states = []

    class Half(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            states.append((trainer.precision_plugin.scaler.get_scale(), float(outputs["loss"])))

    def trained(*aside):
        states.clear()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        run(*aside, callbacks=[Half()], plugins=[precision])
        return list(states)

    expected = trained()
    assert len({scale for scale, _ in expected}) > 5
    assert trained(Aside(12)) == expected
    assert trained(Aside(12, at="on_train_batch_end", batch=3)) == expected


@dataclass
class Nested:
    numbers: list[int] = field(default_factory=list)


class Kept(Callback):
    """Holds every kind of restored object, one of which only its state_dict can restore."""

    class Opaque:
        def __init__(self) -> None:
            self.value = 0

    def __init__(self) -> None:
        self.array, self.queue, self.names, self.wide = np.zeros(3), deque([1, 2]), {"a"}, torch.zeros(1).expand(4)
        self.python, self.numpy, self.old = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.nested, self.missing, self.opaque = Nested([1]), None, Kept.Opaque()

    def state_dict(self):
        return {"opaque": self.opaque.value}

    def load_state_dict(self, state_dict):
        self.opaque.value = state_dict["opaque"]

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.array += 1
        self.queue.append(3)
        self.names.add("b")
        self.nested.numbers.append(2)
        self.missing, self.new = "found", 1
        self.opaque.value += 1
        self.draw()

    def draw(self):
        return self.python.random(), self.numpy.random(), self.old.rand()


def test_what_callbacks_hold_comes_back():
    kept, seen = Kept(), []

    class Watch(Aside):
        def _train(self, trainer):
            super()._train(trainer)
            parts = (kept.array.sum(), [*kept.queue], {*kept.names}, [*kept.nested.numbers], kept.missing)
            seen.append((*parts, hasattr(kept, "new"), kept.opaque.value))
            seen.append(kept.draw())

    run(Watch(3), callbacks=[kept], max_epochs=1)
    assert seen == [(0.0, [1, 2], {"a"}, [1], None, False, 0), Kept().draw()]


def test_nothing_is_logged_and_the_monitors_clock_stands_still():
    logged = []

    class Chatty(Net):
        def training_step(self, batch, batch_idx):
            logged.append(self.logger.log_metrics({"x": 1.0}, step=1) if self.logger else None)
            return super().training_step(batch, batch_idx)

    monitor = RunMonitor()
    seconds = []

    class Watch(Aside):
        def _train(self, trainer):
            super()._train(trainer)
            seconds.extend([monitor._open_seconds(), monitor._open_seconds()])

    run(Watch(3), make=Chatty, callbacks=[monitor], max_epochs=1, log_every_n_steps=1)
    assert seconds[0] == seconds[1]
    assert monitor.samples == BATCHES * BATCH


# --- loaders -------------------------------------------------------------------------------------------------------


def test_with_persistent_workers():
    assert run(Aside(3), data=Plain(2)) == run(data=Plain(2))


class Stateful:
    """A loader with a position of its own, not a DataLoader; it serves one iteration at a time."""

    def __init__(self) -> None:
        self.place = self.iteration = 0

    def __iter__(self):
        self.iteration += 1
        mine = self.iteration
        self.place %= BATCHES
        while self.place < BATCHES:
            assert self.iteration == mine, "another iteration has begun"
            self.place += 1
            yield torch.full((2, 6), float(self.place)), torch.zeros(2, dtype=torch.long)

    def __len__(self) -> int:
        return BATCHES

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_any_loader_with_a_state_goes_back_to_its_place():
    class Own(ResumableDataModule):
        def train_dataloader(self):
            return Stateful()

    expected = run(data=Own(batch_size=2))
    assert run(Aside(10), data=Own(batch_size=2)) == expected
    assert run(Aside(10, at="on_train_batch_end", batch=4), data=Own(batch_size=2)) == expected


def test_a_loader_that_can_be_iterated_once_is_refused():
    class Once(ResumableDataModule):
        def train_dataloader(self):
            return iter([(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))] * 3)

    with pytest.raises(DloError, match="must be iterable more than once"):
        run(Aside(3), data=Once(batch_size=2), limit_train_batches=3)
