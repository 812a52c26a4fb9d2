"""A callback whose fit raised begins the next one as if it were new: Lightning tears nothing down in between."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from dlo_framework.data import ResumableDataModule
from dlo_plugins.compile.callback import Compile
from dlo_plugins.gradients.clipping_and_noise import AdaptiveGradientClipping
from dlo_plugins.images.batch_mix import BatchMix
from dlo_plugins.images.progressive_resizing import ProgressiveResizing
from dlo_plugins.schedules.lr_curves import OneCycle
from support.trainers import quiet_trainer


class Data(ResumableDataModule):
    """Five batches of random images, 3 classes."""

    def __init__(self) -> None:
        super().__init__(batch_size=4, num_workers=0, seed=3)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(2)
        images = torch.randn(20, 3, 16, 16, generator=generator)
        return self.train_loader(TensorDataset(images, torch.arange(20) % 3))


class Net(LightningModule):
    def __init__(self, lr: float = 0.1, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
        self.lr, self.fail_at = lr, fail_at
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if len(self.losses) == self.fail_at:
            raise KeyError("here")
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


CALLBACKS = {
    "BatchMix": lambda: BatchMix(num_classes=3),
    "OneCycle": lambda: OneCycle(),
    "ProgressiveResizing": lambda: ProgressiveResizing({0: 8, "8 samples": 12, 1.5: 16}),
    "AdaptiveGradientClipping": lambda: AdaptiveGradientClipping(),
    "Compile": lambda: Compile(backend="aot_eager"),
}


def losses(trainer, module, data):
    torch.manual_seed(1)
    trainer.fit(module, datamodule=data)
    return module.losses


@pytest.mark.parametrize("name", list(CALLBACKS))
@pytest.mark.parametrize("same_trainer", [True, False])
def test_the_fit_after_one_that_raised_has_the_losses_of_a_new_callbacks(name, same_trainer):
    """The same trainer goes on with its epoch, so it fails in the first. The module that failed had another lr."""

    def trainer(callback):
        return quiet_trainer(callbacks=[callback], max_epochs=2)

    expected = losses(trainer(CALLBACKS[name]()), Net(), Data())
    assert len(set(expected)) == 10
    callback, data = CALLBACKS[name](), Data()
    failed = trainer(callback)
    with pytest.raises(KeyError, match="here"):
        losses(failed, Net(lr=0.01, fail_at=3 if same_trainer else 7), data)
    assert losses(failed if same_trainer else trainer(callback), Net(), data) == expected
