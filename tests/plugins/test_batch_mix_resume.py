"""BatchMix in runs that are stopped and resumed, and on several ranks."""

import contextlib
import signal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Dataset

from dlo_framework.checkpoint import SafeCheckpointIO
from dlo_framework.data import ResumableDataModule
from dlo_framework.defaults import add_default_callbacks
from dlo_framework.stop import RunStopped
from dlo_plugins.images.batch_mix import BatchMix


class Images(Dataset):
    def __len__(self) -> int:
        return 52  # 10 batches an epoch

    def __getitem__(self, index):
        return torch.full((1, 6, 6), float(index % 3)) + 0.1 * torch.randn(1, 6, 6), index % 3


class Data(ResumableDataModule):
    num_classes = 3

    def __init__(self) -> None:
        super().__init__(batch_size=5, num_workers=0, seed=3)

    def train_dataloader(self):
        return self.train_loader(Images())

    def val_dataloader(self):
        return self.eval_loader(Images())


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(36, 3))
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stop(Callback):
    """Sends the signal of Ctrl-C at a batch of the run."""

    def __init__(self, batch: int) -> None:
        self.batch, self.seen = batch, 0

    def on_train_batch_start(self, *_):
        self.seen += 1
        if self.seen == self.batch:
            signal.raise_signal(signal.SIGINT)


def run(folder, *, stop=None, resume=False, **options):
    """Returns the losses of a fit with dlo's default callbacks."""
    torch.manual_seed(1 if not resume else 99)
    module = Net()
    callbacks = [BatchMix(mode="pair", off_epochs=1), *([Stop(stop)] if stop else [])]
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        plugins=[SafeCheckpointIO()],
        callbacks=add_default_callbacks(callbacks, run_folder=folder, model=module, config="{}", progress_bar=False),
        **{"max_epochs": 3, "accumulate_grad_batches": 3, **options},
    )
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(RunStopped):
        trainer.fit(module, datamodule=Data(), ckpt_path=folder / "checkpoints" / "last.ckpt" if resume else None)
    return module.losses


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    losses = run(tmp_path_factory.mktemp("whole") / "run")
    assert len(set(losses)) == 30
    return losses


@pytest.mark.parametrize(
    ("stop", "at"),
    [
        (5, 6),  # in mid-epoch and in the middle of a window
        (10, 10),  # at an epoch's end
        (20, 20),  # where mixing ends
        (22, 23),  # after it
    ],
)
def test_a_run_that_is_stopped_goes_on_with_the_same_losses(whole, tmp_path, stop, at):
    before = run(tmp_path / "run", stop=stop)
    assert before == whole[:at]
    assert run(tmp_path / "run", resume=True) == whole[at:]
