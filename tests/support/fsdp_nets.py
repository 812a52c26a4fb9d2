"""The net, data and trainer of the tests of FSDPStrategy, and the same run in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.testing.record import gather_full_weights
from support.trainers import QUIET

WIDTH, STEPS, BATCH = 6, 4, 8


def data(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randint(5, (BATCH,), generator=generator))
        for _ in range(steps)
    ]


class Batches:
    """A rank's batches, which a resumed run goes on with."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.next = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.next %= len(self.batches)
        while self.next < len(self.batches):
            self.next += 1
            yield self.batches[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def mine(rank: int, world: int, steps: int = STEPS) -> Batches:
    return Batches([tuple(t.chunk(world)[rank] for t in batch) for batch in data(steps)])


def trainer(world: int, strategy: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        **QUIET,
        "devices": world,
        "strategy": strategy,
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return Trainer(**(settings | options))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Module(LightningModule):
    """The common one; ``prepare`` changes the net, ``loss`` computes from it."""

    prepare: Callable[[Any], None] = staticmethod(lambda net: None)
    rate = 0.05

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = Net()
        self.prepare(self.net)
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=self.rate, eps=1e-5, weight_decay=0.1)


class WithAdafactor(Module):
    """Its optimizer needs full tensors."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.net.parameters(), lr=0.02)


def alone(module: Any, epochs: int = 1, parts: int = 1, accumulate: int = 1) -> dict[str, Tensor]:
    """Returns the weights that one process in plain torch comes to."""
    optimizer = module.configure_optimizers()
    batches = data() * epochs
    assert len(batches) % accumulate == 0
    for count, (x, y) in enumerate(batches, 1):
        for number, (inputs, targets) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            module.part = number
            (module.loss((inputs, targets)) / parts / accumulate).backward()
        if count % accumulate:
            continue
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def differ(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the largest difference between two models' weights; NaN if their names differ."""
    if found.keys() != expected.keys():
        return float("nan")
    return max(float((found[name] - value).abs().max()) for name, value in expected.items() if value.numel())


def fit(rank: int, world: int, module: Any, strategy: Any, resume: Path | None = None, **options: Any) -> Trainer:
    """Trains a module on this rank's batches, with checkpoints as those of `dlo fit`."""
    run = trainer(world, strategy, **options)
    use_canonical_checkpoints(run)
    run.fit(module, mine(rank, world), ckpt_path=resume)
    return run


def check_fit(
    rank: int, world: int, module: Any, strategy: Any, expected: dict[str, Tensor], near: float = 1e-6, **options: Any
) -> Trainer:
    """Trains a module, and asserts that its weights are the expected ones."""
    run = fit(rank, world, module, strategy, **options)
    weights = gather_full_weights(run)
    assert rank or differ(weights, expected) < near, strategy
    return run
