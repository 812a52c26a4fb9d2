"""One checkpoint for all strategies: what any has saved, on any number of ranks, any other takes up."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn

from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.digits import DigitsData
from support.checkpoints import Again, check_same
from support.trainers import quiet_trainer

STRATEGIES = {
    "ddp": lambda: "ddp",
    "zero1": partial(ZeroStrategy, 1),
    "zero2": partial(ZeroStrategy, 2),
    "zero3": partial(ZeroStrategy, 3),
    "zero3_offload": partial(ZeroStrategy, 3, offload="both"),
    "fsdp": FSDPStrategy,
}
SAVED, STEPS = 3, 6


class Model(LightningModule):
    """Odd sizes, which no number of ranks divides; a frozen part, tied weights, a buffer, two groups."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.inward = nn.Linear(64, 27)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(27, 45), nn.GELU(), nn.Linear(45, 27)) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(27, momentum=None, affine=True), nn.Linear(27, 10)
        self.norm.eval()
        self.frozen = nn.Linear(27, 27).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.norm.eval()  # Its statistics would be each rank's own.
        x = self.inward(batch[0].mean(1)[:, ::2, ::2].flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x + self.frozen(x))), batch[1])

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "lamb":
            from timm.optim import Lamb

            return Lamb(trained, lr=1e-2)
        matrices, vectors = [p for p in trained if p.ndim == 2], [p for p in trained if p.ndim != 2]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Watch(Callback):
    """Keeps each step's loss, the mean over the ranks, and saves at a step."""

    def __init__(self, save: Path | None) -> None:
        self.save, self.losses = save, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))
        if trainer.global_step == SAVED and self.save is not None:
            trainer.save_checkpoint(self.save)


def train(world_size: int, strategy, save: Path | None = None, resume: Path | None = None, optimizer="adamw"):
    """Returns the losses of the steps after a checkpoint, or of all; saves at a step, or right after resuming."""
    seed_everything(7, workers=True, verbose=False)
    watch = Watch(save if resume is None else None)
    again = Again(save) if resume is not None and save is not None else None
    trainer = quiet_trainer(
        devices=world_size,
        strategy=strategy,
        max_steps=STEPS,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[watch, ExactResume(), *([again] if again else [])],
    )
    use_canonical_checkpoints(trainer)
    trainer.fit(Model(optimizer), datamodule=DigitsData(image_size=16, batch_size=32), ckpt_path=resume)
    return watch.losses


def _runs(rank: int, world_size: int, jobs: list[tuple[str, Path | None, Path | None, str]]) -> list[list[float]]:
    register_data_parallel()
    found = [
        train(world_size, STRATEGIES[name]() if world_size > 1 else "auto", save, resume, optimizer)
        for name, save, resume, optimizer in jobs
    ]
    return found


def test_each_strategy_goes_on_from_another_and_from_one_process(tmp_path: Path) -> None:
    names = list(STRATEGIES)
    (alone,) = run_distributed(_runs, 1, [("ddp", tmp_path / "one", None, "adamw")], backend=None)
    jobs = [(name, tmp_path / name, None, "adamw") for name in names]
    jobs += [(name, tmp_path / f"{name}2", tmp_path / names[n - 1], "adamw") for n, name in enumerate(names)]
    jobs += [(name, tmp_path / f"{name}1", tmp_path / "one", "adamw") for name in ("zero2", "zero3", "fsdp")]
    found = run_distributed(_runs, 2, jobs, backend=None, timeout=280)[0]
    for number, (name, save, resume, _) in enumerate(jobs):
        expected = alone[0] if resume is None else alone[0][SAVED:]
        assert found[number] == pytest.approx(expected, rel=1e-6), (name, resume)
        if resume is not None:
            check_same(resume, save)
    back = [("ddp", tmp_path / f"{name}-back", tmp_path / name, "adamw") for name in names]
    (found,) = run_distributed(_runs, 1, back, backend=None)
    for (_, save, resume, _), losses in zip(back, found, strict=True):
        assert losses == pytest.approx(alone[0][SAVED:], rel=1e-6), resume
        check_same(resume, save)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_any_to_any_from_four_over_two_and_eight_to_one(tmp_path: Path, optimizer: str) -> None:
    names = list(STRATEGIES)
    first = [(name, tmp_path / f"4-{name}", None, optimizer) for name in names]
    reference = run_distributed(_runs, 4, first, backend=None, timeout=900)[0]
    before = {name: tmp_path / f"4-{name}" for name in names}
    for world_size in (2, 8, 1):
        jobs = [
            (name, tmp_path / f"{world_size}-{source}-{name}", path, optimizer)
            for source, path in before.items()
            for name in (names if world_size > 1 else ["ddp"])
        ]
        found = run_distributed(_runs, world_size, jobs, backend=None, timeout=3000)[0]
        for (name, save, resume, _), losses in zip(jobs, found, strict=True):
            assert losses == pytest.approx(reference[0][SAVED:], rel=1e-6), (world_size, resume, name)
            check_same(resume, save)
        # Each strategy's file was read by each other; the next size starts from those that others have written.
        before = {name: jobs[(number * len(names) + number + 1) % len(jobs)][1] for number, name in enumerate(names)}
