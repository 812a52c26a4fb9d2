"""The comparison's run with dlo: `python with_dlo.py`."""

from lightning.pytorch import LightningModule
from shared import make_data, make_model, read_options, record
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import dlo_framework as dlo
from dlo_framework.data import ResumableDataModule


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        record(loss)
        return loss

    def configure_optimizers(self):
        return AdamW(self.parameters(), lr=0.01)


class Data(ResumableDataModule):
    def train_dataloader(self):
        return self.train_loader(make_data())


def main():
    options = read_options()
    trainer = dlo.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=options.strategy,
        max_steps=options.steps,
        gradient_clip_val=0.5,
    )
    trainer.fit(Net(), Data(batch_size=8, num_workers=0), ckpt_path="last" if options.resume else None)


if __name__ == "__main__":
    main()
