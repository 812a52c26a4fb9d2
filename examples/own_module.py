"""A LightningModule of your own under ZeRO 3, on two ranks of this machine: `python own_module.py`."""

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

import dlo_framework as dlo


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return (self.layers(batch[0]) - batch[0].prod(1, True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    trainer = dlo.Trainer(accelerator="cpu", devices=2, strategy="zero3", max_epochs=5)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.rand(512, 2)), 64))
