"""The note about the batch on an error of a user's step, and the warning about a run without a step."""

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule

from dlo_framework import Trainer
from dlo_framework.errors import DloError
from dlo_framework.run_setup import check_run
from dlo_framework.watch.monitor import describe_batch, note_batch


class Net(LightningModule):
    def __init__(self, stage: str) -> None:
        super().__init__()
        self.net, self.stage = torch.nn.Linear(3, 1), stage

    def training_step(self, batch, index):
        return self.net(batch["x"][:, 1:] if self.stage == "training" else batch["x"]).mean()

    def validation_step(self, batch, index):
        self.net(batch["x"][:, 1:] if self.stage == "validation" else batch["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(LightningDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader([{"x": torch.zeros(3)}] * 4, batch_size=2)

    val_dataloader = train_dataloader


@pytest.mark.parametrize("stage", ["training", "validation"])
def test_an_error_of_a_step_has_the_shapes_of_its_batch(stage, tmp_path):
    trainer = Trainer(run_dir=tmp_path, max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        trainer.fit(Net(stage), datamodule=Rows())
    assert caught.value.__notes__ == ["The batch of Rows was {x: Tensor[2, 3] float32}."]


def test_batches_are_described():
    image = (torch.zeros(2, 3), [torch.zeros(2).long(), "name"])
    assert describe_batch(image) == "(Tensor[2, 3] float32, (Tensor[2] int64, str))"
    assert describe_batch([0] * 10) == f"({', '.join(['int'] * 8)}, 2 more)"


@pytest.mark.parametrize(
    ("error", "batch"), [(DloError("clear"), [1]), (KeyboardInterrupt(), [1]), (ValueError(), None)]
)
def test_other_ends_of_a_run_have_no_note(error, batch):
    note_batch(error, batch, None)
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("option", ["max_steps", "max_epochs", "limit_train_batches"])
def test_a_run_without_a_step_says_so(option, tmp_path):
    trainer = Trainer(run_dir=tmp_path, accelerator="cpu", logger=False, **{option: 0})
    with pytest.warns(UserWarning, match=f"trains no step, because trainer.{option} is 0; set it to 1 or more"):
        check_run(trainer, Net("none"), Rows(), command="fit", ckpt_path=None)
