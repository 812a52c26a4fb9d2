"""A small module that trains with everything that watches a run."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.watch.monitor import StepClock


def is_the_step(explained: float) -> bool:
    """Whether no part of a profiled step is left out or counted twice.

    The difference is 0.0002 to 0.007 (benchmarks/results/step_profile_2026-11-24.md); here steps take milliseconds, and
    a process may wait for a core between the two clocks.
    """
    return 0.5 < explained < 2


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 4, bias=False)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return {"loss": loss}

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(self.net.weight.grad.norm().item())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, betas=(0.8, 0.9))


def fit(folder, module=None, batches=20, callbacks=(), **options):
    module = module or Net()
    options = {"max_epochs": 2, "log_every_n_steps": 5, "enable_progress_bar": False, **options}
    trainer = Trainer(
        accelerator="cpu",
        enable_model_summary=False,
        profiler=StepClock(),
        logger=TensorBoardLogger(folder, name="", version=""),
        callbacks=add_default_callbacks(
            list(callbacks),
            run_folder=folder,
            model=module,
            config="{}",
            progress_bar=options["enable_progress_bar"],
        ),
        **options,
    )
    data = DataLoader(TensorDataset(torch.randn(batches * 4, 8)), batch_size=4)
    trainer.fit(module, data, data)
    return module, trainer
