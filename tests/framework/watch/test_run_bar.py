"""What the console shows of a run: losses over all ranks, the module's metrics, and the time that is left."""

from __future__ import annotations

import io
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.testing import run_distributed
from dlo_framework.watch import bar
from dlo_framework.watch.bar import RunBar
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer

STRATEGIES = {"ddp": DataParallelStrategy, "zero3": partial(ZeroStrategy, stage=3)}


class Lines(RunBar):
    """Bar that prints a line for each batch into a string."""

    def __init__(self) -> None:
        super().__init__(seconds_between_lines=0.0)
        self.text = io.StringIO()

    @property
    def _stream(self) -> Any:
        return self.text


class Net(LightningModule):
    def __init__(self, manual: bool, returns: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.returns = not manual, returns
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("at_step", float(batch_idx + 1), prog_bar=True)
        self.log("of_epoch", loss.detach(), prog_bar=True, on_step=False, on_epoch=True, sync_dist=True)
        self.log("hidden", 1.0)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss / 2)
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]) / 2)
            optimizer.step()
        return loss if self.returns else None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def _lines(rank: int, world_size: int, jobs: list[tuple[str, bool, bool, int]]) -> list[list[str]]:
    found = []
    for name, manual, returns, every in jobs:
        seed_everything(1, workers=True, verbose=False)
        lines = Lines()
        trainer = quiet_trainer(
            enable_progress_bar=True,
            devices=world_size,
            strategy=STRATEGIES[name]() if world_size > 1 else "auto",
            max_epochs=2,
            limit_train_batches=3,
            limit_val_batches=0,
            log_every_n_steps=every,
            callbacks=[lines],
        )
        trainer.fit(Net(manual, returns), datamodule=DigitsData(image_size=16, batch_size=32))
        found.append(lines.text.getvalue().splitlines())
    return found


def _values(line: str) -> dict[str, str]:
    """Returns the values of a line, without the time and the rate."""
    return dict(re.findall(r"(\w+) ([\d.]+)(?=,|$)", line.split(": ", 1)[1]))


def test_all_ranks_losses_and_the_modules_metrics_are_shown() -> None:
    kinds = ((False, True, 1), (False, True, 50), (True, False, 1), (True, True, 1))
    jobs = [(name, *kind) for name in STRATEGIES for kind in kinds]
    alone = _lines(0, 1, jobs[: len(kinds)]) * len(STRATEGIES)
    (ranks, silent) = run_distributed(_lines, 2, jobs, backend=None)
    assert silent == [[]] * len(jobs), "one rank prints"
    for one, two, (_, _, _, every) in zip(alone, ranks, jobs, strict=True):
        assert len(one) == len(two) == 2 * 4  # each batch, and each epoch's end
        for number, (left, right) in enumerate(zip(map(_values, one), map(_values, two), strict=True)):
            assert left["loss"] == right["loss"] or (every > 1 and number not in (0, 3, 7)), (number, left, right)
            assert left["at_step"] == right["at_step"] == f"{min(number % 4 + 1, 3)}.0000"
            assert ("of_epoch" in left) == ("of_epoch" in right) == (number >= 3)
            assert left.get("of_epoch") == right.get("of_epoch")
            assert "hidden" not in right
    assert [_values(line)["loss"] for line in alone[2]] == [_values(line)["loss"] for line in alone[3]]


# --- the time that is left of a run, in the bar and in log lines -----------------------------------------------------


def trainer(done: int, **options: Any) -> Any:
    loop = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(completed=done)))
    given = {
        "num_training_batches": 10,
        "max_epochs": 4,
        "max_steps": -1,
        "global_step": done,
        "optimizers": [],
        "progress_bar_metrics": {},
    }
    return SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=loop), **{**given, **options})


def left(done: int, **options: Any) -> float | None:
    """Returns the seconds left where 8 batches since the first have taken 16 seconds."""
    shown = RunBar()
    shown._first = (-16.0, done - 8)
    return shown._seconds_left(trainer(done, **options))


def test_the_end_is_that_of_epochs_or_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bar.time, "perf_counter", lambda: 0.0)
    assert left(10) == 60, "30 of 40 batches, at 2 s each"
    assert left(10, max_steps=15) == 10
    assert left(10, max_steps=15, global_step=5) == 40, "two batches a step"
    assert left(10, max_epochs=None, max_steps=12) == 4
    assert left(40) == 0
    assert left(10, max_epochs=-1) is None
    assert left(10, num_training_batches=float("inf")) is None
