"""Defines a task and its data: classifies tumours as benign or malignant from 30 measurements of their cells."""

from __future__ import annotations

# --8<-- [start:imports]
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from dlo_framework import DloError, ParallelPlan, Task
from dlo_framework.data import ResumableDataModule, ResumableLoader

# --8<-- [end:imports]


# --8<-- [start:model]
class Block(nn.Module):
    """Residual block, which the model repeats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, width] to [B, width]."""
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


class Network(nn.Module):
    """Network of a stem, equal blocks, and a head."""

    def __init__(self, features: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, features] to logits [B, classes]."""
        return self.head(self.blocks(self.stem(x)))


# --8<-- [end:model]


# --8<-- [start:task]
class TumourClassifier(Task):
    """Classifies tumours as malignant or benign.

    Batches are (measurements, targets): float [B, features], int64 [B].

    Args:
        width: Features of the hidden layers.
        depth: Number of residual blocks.
        lr: Learning rate of AdamW.
    """

    best_metric = ("val_acc1", "max")  # Metric that selects the best checkpoint.

    def __init__(self, width: int = 32, depth: int = 4, lr: float = 3e-3) -> None:
        super().__init__()
        self.width, self.depth, self.lr = width, depth, lr
        self.features = 30
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def check(self, datamodule: object) -> None:
        """Refuses data with another number of measurements, before the run starts."""
        found = getattr(datamodule, "features", self.features)
        if found != self.features:
            raise DloError(f"data must have {self.features} measurements, got {found}; use TumourData")

    def configure_model(self) -> None:
        """Builds the network, once."""
        if not self.has_model:
            self.model = Network(self.features, self.width, self.depth, classes=2)

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the cross-entropy, a mean over the batch's samples."""
        return nn.functional.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Metric | Tensor]:
        """Adds `val_acc1` and `test_acc1` to the loss."""
        self.accuracy.update(outputs, batch[1])
        return {"acc1": self.accuracy}

    # --8<-- [start:plan]
    def parallel_plan(self) -> ParallelPlan:
        """Returns the parallel plan, with names relative to `self.model`."""
        return ParallelPlan(
            blocks=("blocks.*",),
            stem=("stem",),
            head=("head",),
            tensor={"blocks.*.fc1": "column", "blocks.*.fc2": "row"},
        )

    # --8<-- [end:plan]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


# --8<-- [end:task]


# --8<-- [start:data]
class TumourData(ResumableDataModule):
    """Loads 569 tumours that ship with scikit-learn; holds out every fifth.

    Args:
        batch_size: Samples over all ranks together.
        seed: Seed of the sample order.
    """

    def __init__(self, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__(batch_size=batch_size, num_workers=0, seed=seed)
        self.features = 30

    def _split(self, *, held_out: bool) -> TensorDataset:
        measured, targets = load_breast_cancer(return_X_y=True)
        inputs = torch.tensor(measured, dtype=torch.float32)
        chosen = (torch.arange(len(inputs)) % 5 == 0) == held_out
        inputs = (inputs - inputs.mean(0)) / inputs.std(0)
        return TensorDataset(inputs[chosen], torch.tensor(targets)[chosen])

    def train_dataloader(self) -> ResumableLoader:
        """Returns the loader: a new order each epoch, and full batches only."""
        return self.train_loader(self._split(held_out=False))

    def val_dataloader(self) -> ResumableLoader:
        """Returns the loader: each held-out sample once."""
        return self.eval_loader(self._split(held_out=True))


# --8<-- [end:data]
