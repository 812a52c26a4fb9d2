"""Profile on two ranks: a slow loader and a slow rank are named, and a run with it equals one without."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.testing import run_distributed
from dlo_framework.watch.monitor import StepClock
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.profile.callback import Profile
from dlo_plugins.profile.operations import EXPOSED
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from support.monitored import is_the_step
from support.runs import Losses
from support.strategies import STRATEGIES
from support.trainers import quiet_trainer

#: Gathers ahead of their use.
SOME = ("zero3",)
STEPS = 9


def train(folder: Path, strategy: Any, module: Any, data: Any, callbacks: list[Callback]) -> Trainer:
    seed_everything(5, workers=True, verbose=False)
    folder.mkdir(parents=True, exist_ok=True)
    register_data_parallel()
    every = add_default_callbacks(
        callbacks, run_folder=folder, model=module, config="{}", progress_bar=False, checkpoints=False
    )
    trainer = quiet_trainer(
        devices=2, strategy=strategy, max_steps=STEPS, callbacks=every, profiler=StepClock(), limit_val_batches=0
    )
    use_canonical_checkpoints(trainer)
    trainer.fit(module, data)
    return trainer


def classifier() -> ImageClassifier:
    seed_everything(5, verbose=False)
    args = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return ImageClassifier("vit_tiny_patch16_224", model_args=args, num_classes=10, schedule="constant")


def trained(rank: int, world_size: int, folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns each strategy's losses without and with Profile, and the profiles' figures."""
    found: dict[str, Any] = {}
    for name in names:
        make, runs = STRATEGIES[name], []
        for own in ([], [Profile(wait=3, warmup=1, active=3, machine="cpu")]):
            losses = Losses()
            place = folder / f"{name}{len(own)}"
            train(place, make(), classifier(), DigitsData(image_size=16, batch_size=16), [losses, *own])
            runs.append(losses.found)
        report = own[0].report
        figures = None
        if report is not None:
            figures = [(each.explained, each.breakdown.kind(EXPOSED), each.waits is not None) for each in report.ranks]
        found[name] = (*runs, figures, sorted(path.name for path in (folder / f"{name}1" / "profile").iterdir()))
    return found


def overlapped(rank: int, world_size: int, folder: Path) -> int:
    """Profiles under a strategy whose gathers go on after a step: only dlo's callbacks are there."""
    profile = Profile(wait=1, warmup=1, active=2, machine="cpu", formats=["chrome"], waits=False)
    train(folder, ZeroStrategy(2), classifier(), DigitsData(image_size=16, batch_size=32), [profile])
    return 0 if profile.report is None else len(profile.report.ranks)


def test_collectives_in_flight_end_before_the_profiler(tmp_path) -> None:
    """Processes ended by memory errors where gloo completed a gather after the profiler had stopped."""
    assert run_distributed(overlapped, 2, tmp_path, backend=None) == [2, 0]


@pytest.mark.parametrize(
    "names", [SOME, pytest.param(("ddp", "zero3", "fsdp", "tp", "pp"), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_run_with_a_profile_equals_one_without_and_each_rank_adds_up(tmp_path, names) -> None:
    first, second = run_distributed(trained, 2, tmp_path, names, backend=None)
    for name in names:
        plain, profiled, figures, files = first[name]
        assert len(plain) == STEPS, name
        assert profiled == plain, name  # to the bit
        assert second[name][1] == second[name][0], name
        assert len(set(plain)) == STEPS, name  # it trains
        assert second[name][2] is None  # rank 0 reports
        assert len(figures) == 2
        for explained, exposed, searched in figures:
            assert is_the_step(explained), name
            assert exposed > 0, name
            assert searched
        traces = [file for file in files if file.startswith("rank_")]
        assert traces == ["rank_0.0.pt.trace.json.gz", "rank_1.0.pt.trace.json.gz"], name


class Net(LightningModule):
    """A net whose steps take some milliseconds, with a planted fault on rank 1."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        self.fault = fault

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].repeat(64, 1)
        if self.global_rank == 1 and self.fault == "compute":
            for _ in range(240):
                torch.mm(torch.ones(256, 256), torch.ones(256, 256))
        if self.global_rank == 1 and self.fault == "host":
            time.sleep(0.2)
        return self.net(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Rows(TensorDataset):
    """Rows that rank 1 loads slowly."""

    def __init__(self, slow: bool) -> None:
        super().__init__(torch.randn(8 * STEPS, 256))
        self.slow = slow

    def __getitem__(self, index: int) -> Any:
        if self.slow:
            time.sleep(0.05)
        return super().__getitem__(index)


def planted(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Returns, for each fault, the rank and the cause that the report names, on rank 0."""
    found = {}
    for fault in ("compute", "host", "data"):
        data = DataLoader(Rows(fault == "data" and rank == 1), batch_size=4)
        own = Profile(wait=2, warmup=1, active=4, machine="cpu", formats=["chrome"], waits=False)
        train(folder / fault, "ddp", Net(fault), data, [own])
        if rank == 0:
            found[fault] = json.loads((folder / fault / "profile" / "report.0.json").read_text())["stragglers"]
    one = Profile(wait=2, warmup=1, active=2, machine="cpu", formats=["chrome"], ranks=[1])
    train(folder / "one", "ddp", Net(""), DataLoader(Rows(False), batch_size=4), [one])
    if rank == 0:
        found["one"] = [each.rank for each in one.report.ranks], [p.name for p in (folder / "one").rglob("*.trace.*")]
    return found


@pytest.mark.slow
def test_planted_faults_are_named_with_their_rank_and_cause(tmp_path) -> None:
    found = run_distributed(planted, 2, tmp_path, backend=None)[0]
    for fault in ("compute", "host", "data"):
        assert (found[fault]["slowest"], found[fault]["cause"]) == (1, fault), found[fault]["text"]
    assert found["one"] == ([1], ["rank_1.0.pt.trace.json.gz"])
    # 240 products, 200 ms of sleep, four rows of 50 ms: most of it is that cause's.
    assert found["host"]["by_cause"]["host"] > 0.15
    assert found["data"]["by_cause"]["data"] > 0.15
