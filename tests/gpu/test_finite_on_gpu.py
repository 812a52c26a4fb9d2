"""A loss that is not finite on an accelerator: read while backward runs, and kept from the weights all the same."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.errors import DloError
from dlo_framework.finite import FiniteLoss

BATCHES, BAD = 8, 5


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(callback: FiniteLoss, accumulate: int = 1, precision: str = "32-true"):
    x = torch.ones(BATCHES * 16, 64)
    x[BAD * 16] = float("inf")
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        precision=precision,
        accumulate_grad_batches=accumulate,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Net()
    error = ""
    try:
        trainer.fit(module, DataLoader(TensorDataset(x), batch_size=16))
    except DloError as caught:
        error = str(caught)
    steps = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
    return all(bool(p.isfinite().all()) for p in module.parameters()), steps, error


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_step_is_not_taken(precision):
    finite, steps, error = fit(FiniteLoss(), precision=precision)
    assert (finite, steps) == (True, {BAD})
    assert "not finite in step 6 (epoch 1, batch 6)" in error
    assert fit(FiniteLoss("skip"), precision=precision) == (True, {BATCHES - 1}, "")
    # The whole window is left out in which the bad batch is: of batches 0-3 and 4-7 the second.
    assert fit(FiniteLoss("skip"), accumulate=4, precision=precision) == (True, {1.0}, "")


def test_with_a_loss_scaler_the_scaler_does_it():
    finite, _, error = fit(FiniteLoss(), precision="16-mixed")
    assert (finite, error) == (True, "")
