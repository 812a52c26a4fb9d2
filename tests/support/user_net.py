"""A small module of a user, who names this file under `plugins:`; it brings its own data."""

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    best_metric = ("val", "max")

    def __init__(self, dropout: float | None = 0.5, width: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(dropout or 0), torch.nn.Linear(3, 1))

    def forward(self, batch):
        return self.net(batch[0])

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
