"""The finders on an accelerator: its random state and its scaler come back, and its memory really runs out."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from dlo_plugins.batches.micro_batch_finder import MicroBatchFinder
from dlo_plugins.schedules.lr_finder import LRFinder

FEATURES = 2**16  # 256 kB a sample
MEMORY = 2 * 2**30


class Wide(Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index):
        return torch.full((FEATURES,), index / 1e5), index % 3


class Net(LightningModule):
    """Dropout draws on the device, and keeps the batch several times over for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(FEATURES, 3)
        )

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


def fit(folder, *callbacks, precision="32-true"):
    torch.manual_seed(1)
    torch.cuda.manual_seed(1)
    losses = Losses()
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        precision=precision,
        max_steps=12,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[*callbacks, losses],
    )
    trainer.fit(Net(), DataLoader(Wide(), batch_size=8, shuffle=True))
    return losses.seen


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_training_is_bit_for_bit_that_without_the_sweep(tmp_path, precision):
    expected = fit(tmp_path, precision=precision)
    finder = LRFinder(num_steps=40, suggestion="minimum", apply=False)
    assert fit(tmp_path, finder, precision=precision) == expected
    assert finder.lr is not None


def test_the_search_ends_where_memory_does(tmp_path):
    expected = fit(tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(MEMORY / torch.cuda.get_device_properties(0).total_memory)
    try:
        finder = MicroBatchFinder(margin=0.0)
        found = fit(tmp_path, finder)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found == expected
    assert [fits for _, fits in finder.trials].count(False) > 0
    # A sample is kept three times at least, and not ten times.
    assert MEMORY / (10 * FEATURES * 4) < finder.per_rank < MEMORY / (2 * FEATURES * 4)
