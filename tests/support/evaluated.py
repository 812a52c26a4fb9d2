"""Modules and data of the tests that evaluation is one process's: losses, targets and batches of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import CatMetric, MeanSquaredError
from torchmetrics.classification import MulticlassAUROC

from dlo_framework import ParallelPlan, Task
from dlo_framework.data import Draw, ResumableDataModule, ResumableLoader
from support.trainers import QUIET

WIDTH, CLASSES = 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block(), Block())
        self.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net()


class Base(Task):
    """A task whose loss knows nothing of padding."""

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = net()

    def parallel_plan(self) -> ParallelPlan:
        rules = {"blocks.*.fc1": "column", "blocks.*.fc2": "row"}
        return ParallelPlan(blocks=("blocks.*",), stem=("stem",), head=("head",), tensor=rules)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Mse(Base):
    """Float targets."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        return {"largest": (outputs - batch[1]).abs().mean()}


class Classes(Base):
    """Classes, by a loss that ignores none, and metrics of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = MulticlassAUROC(CLASSES, thresholds=None)  # Its states are lists.
        self.squares = MeanSquaredError()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def metrics(self, outputs: Tensor, batch: Any) -> dict[str, Any]:
        self.auroc.update(outputs.softmax(1), batch[1])
        self.squares.update(outputs[:, 0], batch[0][:, 0])
        hits = (outputs.argmax(1) == batch[1]).float().mean()
        return {"auroc": self.auroc, "squares": self.squares, "hits": hits}


class Dicts(Base):
    """Nested dicts."""

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch["features"]["x"],), {}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch["wanted"][0]).abs().mean()


class Columns(Base):
    """Batches whose first dim is not the samples': features by samples."""

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch["x"].T,), {}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch["y"].T)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"sums": super().predict_step(batch, batch_idx).sum(1)}


class Plain(LightningModule):
    """Not a Task: it logs by itself, and keeps what it saw in a list, a buffer and a metric that it does not log."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.cat = CatMetric()
        self.register_buffer("total", torch.zeros(()))
        self.seen: list[Tensor] = []
        self.calls = 0

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        loss = F.mse_loss(outputs, batch[1])
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_own", loss, sync_dist=True, batch_size=len(outputs), on_step=True, on_epoch=True)
        self.log("val_sum", (outputs - batch[1]).square().sum(), sync_dist=True, reduce_fx="sum")
        self.log("val_max", outputs.max(), sync_dist=True, reduce_fx="max")
        self.cat.update(outputs.sum(1))
        self.seen.append(batch[1])
        self.total += len(outputs)
        self.calls += 1
        return loss

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        count = sum(len(part) for part in self.seen)
        assert int(self.total) == count
        self.log("val_count", float(count), sync_dist=True, reduce_fx="sum", batch_size=1)
        self.log("val_cat", self.cat.compute().mean())
        self.cat.reset()
        self.seen.clear()
        self.total.zero_()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Whole:
    """A BatchDataset."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, draws: list[Draw]) -> tuple[Tensor, Tensor]:
        assert all(draw.real for draw in draws)
        index = [draw.index for draw in draws]
        return self.x[index], self.y[index]


def columns(items: list[Any]) -> dict[str, Any]:
    x, y = (torch.stack(values, dim=1) for values in zip(*items, strict=True))
    return {"number": torch.tensor(3.0), "x": x, "y": y}


class Kind(NamedTuple):
    """A module, and how the data come to it."""

    module: Callable[[], LightningModule]
    dataset: Callable[[Tensor, Tensor, Tensor], Any] = lambda x, y, c: TensorDataset(x, y)
    collate: Callable[[list[Any]], Any] | None = None


def causal_lm() -> LightningModule:
    from dlo_tasks.language.causal_lm import CausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "qwen3", **sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        task = CausalLM(config=config)
        task.configure_model()
    return task


def tokens(x: Tensor, y: Tensor, classes: Tensor) -> list[dict[str, Tensor]]:
    """Samples with different numbers of labels."""
    found = []
    for number in range(len(x)):
        ids = torch.randint(32, (9,), generator=torch.Generator().manual_seed(number))
        labels = ids[1:].clone()
        labels[: number % 4] = -100
        found.append({"input_ids": ids[:-1], "labels": labels, "position_ids": torch.arange(8)})
    return found


KINDS = {
    "mse": Kind(Mse),
    "classes": Kind(Classes, lambda x, y, c: TensorDataset(x, c)),
    "dicts": Kind(Dicts, lambda x, y, c: [{"features": {"x": a}, "wanted": [b]} for a, b in zip(x, y, strict=True)]),
    "columns": Kind(Columns, collate=columns),
    "whole": Kind(Mse, lambda x, y, c: Whole(x, y)),
    "plain": Kind(Plain),
    "tokens": Kind(causal_lm, tokens),
}


class Samples(ResumableDataModule):
    """Samples that differ much, so that one too many or too few shows."""

    def __init__(self, kind: Kind, samples: int, batch_size: int, workers: int = 0) -> None:
        super().__init__(batch_size=batch_size, num_workers=workers)
        self.kind, self.samples = kind, samples

    def _loader(self, name: str) -> ResumableLoader:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(self.samples, WIDTH, generator=generator) * torch.arange(1, self.samples + 1)[:, None]
        y = torch.randn(self.samples, CLASSES, generator=generator) * 3
        classes = torch.randint(CLASSES, (self.samples,), generator=generator)
        options: dict[str, Any] = {"collate_fn": self.kind.collate} if self.kind.collate else {}
        return self.eval_loader(self.kind.dataset(x, y, classes), name=name, **options)

    def val_dataloader(self) -> ResumableLoader:
        return self._loader("val")

    def predict_dataloader(self) -> ResumableLoader:
        return self._loader("predict")

    test_dataloader = val_dataloader


class PlainSamples(LightningDataModule):
    """The same samples in torch's DataLoaders, whose batch size is each rank's.

    Args:
        own_sampler: Whether the DataLoader has a DistributedSampler of its own, so that Lightning inserts none.
    """

    def __init__(self, kind: Kind, samples: int, batch_size: int, own_sampler: bool = False, **options: Any) -> None:
        super().__init__()
        self.source, self.own_sampler = Samples(kind, samples, batch_size), own_sampler
        self.options = {"batch_size": batch_size, **options}

    def val_dataloader(self) -> DataLoader:
        dataset = self.source.val_dataloader().dataset
        sampler = DistributedSampler(dataset, shuffle=False) if self.own_sampler else None
        return DataLoader(dataset, sampler=sampler, collate_fn=self.source.kind.collate, **self.options)

    test_dataloader = predict_dataloader = val_dataloader


def trainer(world: int, strategy: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        **QUIET,
        "devices": world,
        "strategy": strategy,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**(settings | options))


def measured(
    world: int, strategy: Any, name: str, samples: int, batch_size: int, data: Any = Samples
) -> dict[str, float]:
    """Returns what a validation logged."""
    run, kind = trainer(world, strategy), KINDS[name]
    run.validate(kind.module(), data(kind, samples, batch_size), verbose=False)
    return {key: float(value) for key, value in run.callback_metrics.items() if not key.endswith("_step")}
