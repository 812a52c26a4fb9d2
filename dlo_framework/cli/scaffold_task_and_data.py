"""Templates of the task and the data that ``dlo plugins new`` writes; see ``scaffold_templates``."""

from __future__ import annotations

#: End of every generated test file; its one placeholder is the kind.
FINDS_IT = """

def test_dlo_accepts_it_as_a_plugin() -> None:
    file = Path(__file__).with_name("$name.py")
    (plugin,) = Registry().load_user_module(str(file))
    assert (plugin.kind, plugin.name) == ("%s", "$class_name")
"""

TASK = '''"""Task $class_name: classifies images with a small network."""

from __future__ import annotations

from collections import OrderedDict

import torch
from dlo_framework import DloError, ParallelPlan, Task
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy


class $class_name(Task):
    """Classifies images with a few fully connected layers.

    Batches are (images, targets): float images [B, 3, H, W], class indices [B].

    Args:
        num_classes: Number of classes.
        image_size: Height and width of the images, in pixels.
        width: Features of the hidden layers.
        depth: Number of hidden layers.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(
        self,
        num_classes: int = 10,
        image_size: int = 16,
        width: int = 128,
        depth: int = 2,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.image_size = image_size
        self.width = width
        self.depth = depth
        self.learning_rate = learning_rate
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def check(self, datamodule: LightningDataModule | None) -> None:
        """Raises a DloError for data with another number of classes."""
        given = getattr(datamodule, "num_classes", self.num_classes)
        if given != self.num_classes:
            raise DloError(
                f"num_classes must be the data's {given}, got {self.num_classes}; "
                f"set model.init_args.num_classes to {given}"
            )

    def configure_model(self) -> None:
        """Builds the network: a stem, equal blocks, and a head."""
        if self.has_model:
            return
        width = self.width
        stem = nn.Sequential(nn.Flatten(), nn.Linear(3 * self.image_size**2, width))
        blocks = [
            nn.Sequential(nn.GELU(), nn.Linear(width, width)) for _ in range(self.depth)
        ]
        head = nn.Linear(width, self.num_classes)
        parts = {"stem": stem, "blocks": nn.Sequential(*blocks), "head": head}
        self.model = nn.Sequential(OrderedDict(parts))

    def parallel_plan(self) -> ParallelPlan:
        """Returns the modules at which a strategy may cut the network."""
        return ParallelPlan(blocks=("blocks.*",), stem=("stem",), head=("head",))

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the cross-entropy, a mean over the batch's samples."""
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(
        self, outputs: Tensor, batch: tuple[Tensor, Tensor]
    ) -> dict[str, Metric | Tensor]:
        """Returns the accuracy: logged once an epoch as `val_acc1` or `test_acc1`."""
        self.accuracy.update(outputs, batch[1])
        return {"acc1": self.accuracy}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
'''

TASK_TEST = (
    '''"""Tests of $class_name."""

from pathlib import Path

import pytest
import torch
from dlo_framework import DloError
from dlo_framework.registry import Registry
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from $name import $class_name


def bright_and_dark() -> DataLoader:
    targets = torch.arange(64) % 2
    images = torch.randn(64, 3, 8, 8) + 2.0 * targets.view(-1, 1, 1, 1)
    return DataLoader(TensorDataset(images, targets), batch_size=16)


def test_it_learns() -> None:
    seed_everything(0)
    task = $class_name(num_classes=2, image_size=8, width=16, learning_rate=1e-2)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, bright_and_dark(), bright_and_dark())
    assert trainer.callback_metrics["val_acc1"] > 0.95


def test_its_plan_names_parts_of_its_model() -> None:
    task = $class_name(image_size=8, depth=3)
    task.configure_model()
    names = [name for name, _ in task.model.named_children()]
    assert names == ["stem", "blocks", "head"]
    assert len(task.model.blocks) == 3


def test_the_loss_is_a_mean_over_samples() -> None:
    task = $class_name(num_classes=2)
    outputs, targets = torch.tensor([[2.0, 0.0], [0.0, 9.0]]), torch.tensor([0, 1])
    each = [task.loss(outputs[i : i + 1], (None, targets[i : i + 1])) for i in (0, 1)]
    assert task.loss(outputs, (None, targets)) == sum(each) / 2


def test_another_number_of_classes_is_refused() -> None:
    data = LightningDataModule()
    data.num_classes = 7
    with pytest.raises(DloError, match=r"set model\\.init_args\\.num_classes to 7"):
        $class_name(num_classes=2).check(data)
'''
    + FINDS_IT % "task"
)

DATA = '''"""Data $class_name: synthetic images, to be replaced by yours."""

from __future__ import annotations

import torch
from dlo_framework import DloError
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class $class_name(LightningDataModule):
    """Generates images of noise that are brighter for higher classes.

    Batches are (images, targets): float images [B, 3, H, W], class indices [B].

    Args:
        num_classes: Number of classes.
        image_size: Height and width of the images, in pixels.
        samples: Number of training images; validation has a quarter as many.
        batch_size: Images in a batch.
        num_workers: Number of loader processes; 0 loads in the training process.
        seed: Seed of the images.

    Raises:
        DloError: If there are fewer validation images than classes.
    """

    def __init__(
        self,
        num_classes: int = 10,
        image_size: int = 16,
        samples: int = 1024,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if samples // 4 < num_classes:
            raise DloError(
                f"samples must be at least {4 * num_classes} for {num_classes} "
                f"classes, got {samples}"
            )
        self.num_classes = num_classes
        self.class_names = [f"brightness {index}" for index in range(num_classes)]
        self.image_size = image_size
        self.samples = samples
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed

    def train_dataloader(self) -> DataLoader:
        """Returns the training batches."""
        return self._loader(self.samples, self.seed, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Returns the validation batches, of other images."""
        return self._loader(self.samples // 4, self.seed + 1, shuffle=False)

    def _loader(self, samples: int, seed: int, *, shuffle: bool) -> DataLoader:
        return DataLoader(
            self._images(samples, seed),
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
        )

    def _images(self, samples: int, seed: int) -> TensorDataset:
        targets = torch.arange(samples) % self.num_classes
        noise = torch.randint(
            0,
            64,
            (samples, 3, self.image_size, self.image_size),
            generator=torch.Generator().manual_seed(seed),
        )
        brightness = targets * 191 // max(self.num_classes - 1, 1)
        images = noise + brightness.view(-1, 1, 1, 1)
        # Bytes until they are on the device: a quarter of the transfer of floats.
        return TensorDataset(images.to(torch.uint8), targets)

    def on_after_batch_transfer(
        self, batch: tuple[Tensor, Tensor], dataloader_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Normalises the images to [-1, 1], on the device."""
        images, targets = batch
        return images.float() / 127.5 - 1.0, targets
'''

DATA_TEST = (
    '''"""Tests of $class_name."""

from pathlib import Path

import pytest
import torch
from dlo_framework import DloError
from dlo_framework.registry import Registry

from $name import $class_name


def test_shapes_and_range() -> None:
    data = $class_name(num_classes=4, image_size=8, samples=64, batch_size=16)
    batches = list(data.train_dataloader())
    assert len(batches) == 4
    images, targets = data.on_after_batch_transfer(batches[0], dataloader_idx=0)
    assert images.shape == (16, 3, 8, 8)
    assert -1.0 <= images.min() < images.max() <= 1.0
    assert targets.unique().tolist() == [0, 1, 2, 3]
    assert len(data.class_names) == data.num_classes == 4


def test_higher_classes_are_brighter() -> None:
    images, targets = next(iter($class_name(num_classes=3).val_dataloader()))
    means = [images[targets == index].float().mean() for index in range(3)]
    assert means[0] < means[1] < means[2]


def test_one_seed_gives_one_set_of_images() -> None:
    first, again, other = (
        next(iter($class_name(seed=seed).val_dataloader()))[0] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(DloError, match="at least 40 for 10 classes, got 8"):
        $class_name(samples=8)
'''
    + FINDS_IT % "data"
)
