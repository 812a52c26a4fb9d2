"""Training on the side reads batches of every kind of loader and does not move its position; and its helpers."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError
from dlo_framework.rehearsal import BeforeTraining, rehearse
from support.noisy_data import BATCH, BATCHES, Noisy


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Aside(Callback):
    """Trains on the side for some optimizer steps before a batch of the first epoch, and undoes it."""

    def __init__(self, steps: int, after_batch: int | None = None) -> None:
        self.steps, self.after_batch = steps, after_batch

    def _train(self, trainer) -> None:
        place = getattr(trainer.train_dataloader, "state_dict", dict)()
        with rehearse(trainer) as rehearsal:
            for _ in range(self.steps):
                rehearsal.optimizer_step()
        assert getattr(trainer.train_dataloader, "state_dict", dict)() == place

    def on_train_epoch_start(self, trainer, pl_module):
        if self.after_batch is None and trainer.current_epoch == 0:
            self._train(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.after_batch and trainer.current_epoch == 0:
            self._train(trainer)


def run(*aside: Callback, data, make=Net, **options):
    """Returns the losses of a fit, its weights, and the next random numbers."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    module = make()
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=2, callbacks=list(aside), **off, **options)
    trainer.fit(module, datamodule=data)
    assert len(module.losses) == trainer.global_step > 0
    after = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    return module.losses, [tensor.tolist() for tensor in module.state_dict().values()], after


class Workers(ResumableDataModule):
    def train_dataloader(self):
        return self.train_loader(Noisy())


class PlainWorkers(ResumableDataModule):
    """Loaders as users write them, shuffled from torch's global generator."""

    def train_dataloader(self):
        return DataLoader(Noisy(), batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True)


@pytest.mark.parametrize("data", [Workers, PlainWorkers])
def test_with_persistent_workers(data):
    assert run(Aside(3), data=data(batch_size=BATCH, num_workers=2)) == run(data=data(batch_size=BATCH, num_workers=2))


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
    assert run(Aside(10, after_batch=4), data=Own(batch_size=2)) == expected


class Ones:  # A loader without a state, shorter than the others.
    def __iter__(self):
        return iter([torch.ones(2)] * 3)

    def __len__(self) -> int:
        return 3


def test_several_loaders_of_which_one_is_no_dataloader():
    class Several(ResumableDataModule):
        def train_dataloader(self):
            return {"a": DataLoader(Noisy(), batch_size=BATCH, shuffle=True), "b": Ones()}

    class Both(Net):
        def training_step(self, batch, batch_idx):
            assert batch["b"].sum() == 2
            return super().training_step(batch["a"], batch_idx)

    options = {"data": Several(batch_size=BATCH), "make": Both}
    assert run(Aside(10), **options) == run(**options)


def test_a_loader_that_can_be_iterated_once_is_refused():
    class Once(ResumableDataModule):
        def train_dataloader(self):
            return iter([(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))] * 3)

    with pytest.raises(DloError, match="must be iterable more than once"):
        run(Aside(3), data=Once(batch_size=2), limit_train_batches=3)


def test_a_stream_without_a_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(Noisy()[index] for index in range(28))

    class Streamed(ResumableDataModule):
        def train_dataloader(self):
            return DataLoader(Stream(), batch_size=BATCH)

    assert run(Aside(10), data=Streamed(batch_size=BATCH)) == run(data=Streamed(batch_size=BATCH))


def test_a_callback_that_does_nothing_before_training_is_refused_at_construction():
    class Idle(BeforeTraining):
        pass

    with pytest.raises(TypeError, match="before_training"):
        Idle()
