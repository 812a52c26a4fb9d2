"""The comparison's run with Lightning alone: `python with_lightning.py --strategy ddp`."""

from lightning.pytorch import LightningModule, Trainer, seed_everything
from shared import make_data, make_model, read_options, record
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader


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


def main():
    options = read_options()
    seed_everything(1)
    data = DataLoader(make_data(), 8 // options.ranks, shuffle=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=options.strategy,
        max_steps=options.steps,
        gradient_clip_val=0.5,
    )
    trainer.fit(Net(), data, ckpt_path="last.ckpt" if options.resume else None)
    trainer.save_checkpoint("last.ckpt")


if __name__ == "__main__":
    main()
