"""Profile on one process and on two: the parts add up, planted waits are named, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.watch.monitor import StepClock
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.profile import callback
from dlo_plugins.profile.callback import Profile
from dlo_plugins.profile.module_ranges import ModuleRanges, trace_ranges
from dlo_plugins.profile.operations import ATTENTION, DATA, EXPOSED, KINDS, MATRIX, OPTIMIZER
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from support.monitored import Net, fit, is_the_step
from support.runs import Losses
from support.strategies import STRATEGIES
from support.trainers import Squares, quiet_trainer


@pytest.fixture
def no_pictures(monkeypatch) -> None:
    """Draws nothing: that takes longer than these runs."""
    monkeypatch.setattr(callback, "draw_figure", lambda owner, draw: None)


class Wide(Net):
    """A net with products that take time, and a planted wait."""

    def __init__(self, waits: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 4)
        )
        self.waits = waits

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0].repeat(64, 1)).square().mean()
        if self.waits and loss.item() < 0:  # the planted wait
            raise AssertionError
        return loss

    def on_before_optimizer_step(self, optimizer):
        pass


def profiled(folder, module, fails=False):
    own = Profile(wait=3, warmup=1, active=4, machine="cpu")
    with pytest.raises(RuntimeError, match="boom") if fails else contextlib.nullcontext():
        fit(folder, module, callbacks=[own], max_epochs=1)
    return own, module


def test_the_parts_add_up_to_the_step_and_the_files_are_there(tmp_path, capsys) -> None:
    own, module = profiled(tmp_path, Wide(waits=True))
    report = own.report
    assert report is not None
    (profile,) = report.ranks
    assert report.steps == (4, 7)
    assert [step.number for step in profile.breakdown.steps] == [4, 5, 6, 7]
    # The sum is of the trace's times; the other clock is the host's.
    assert is_the_step(profile.explained)
    assert sum(each.seconds for each in profile.breakdown.modules.values()) == pytest.approx(
        sum(step.wall for step in profile.breakdown.steps), rel=1e-6
    )
    for kind in (MATRIX, OPTIMIZER, DATA):
        assert profile.breakdown.kind(kind) > 0, kind
    assert profile.breakdown.kind(ATTENTION) == 0
    big = profile.breakdown.modules["net.3"]
    assert big.forward > 0
    assert big.backward > 0
    # 256 rows x 256 x 256, forward and both gradients, four steps.
    assert big.flops == 4 * 3 * 2 * 256**3
    (wait,) = (wait for wait in profile.waits if wait.source.endswith("# the planted wait"))
    assert (wait.operation, wait.count) == ("item", 1)
    assert f"{Path(__file__).name}:" in wait.place
    folder = tmp_path / "profile"
    assert {path.name for path in folder.iterdir()} == {
        "rank_0.0.pt.trace.json.gz", "report.0.txt", "report.0.json", "time.0.png", "memory.0.png",
    }  # fmt: skip
    written = json.loads((folder / "report.0.json").read_text())
    own_rank = written["ranks"][0]
    shares = own_rank["explained"] * own_rank["step_seconds"]
    assert sum(own_rank["kinds"].values()) == pytest.approx(shares) == pytest.approx(profile.breakdown.wall)
    assert (folder / "report.0.txt").read_text().strip() in capsys.readouterr().out
    events = json.loads(gzip.decompress((folder / "rank_0.0.pt.trace.json.gz").read_bytes()))["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "module_backward"} >= {"net.0", "net.3", "net.4"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["profile"]["steps"] == [4, 7]
    assert summary["profile"]["step_seconds"] == own_rank["step_seconds"]
    assert sum(summary["profile"]["kinds"].values()) == pytest.approx(shares)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert {"profile/time", "profile/memory"} <= set(board.Tags()["images"])
    assert "profile/report/text_summary" in board.Tags()["tensors"]
    assert profile.memory is not None
    assert profile.memory.peak > 256 * 256 * 4


class Slow(TensorDataset):
    def __getitem__(self, index):
        torch.randn(200_000).sort()
        return super().__getitem__(index)


def test_a_slow_loader_is_the_steps_largest_part(tmp_path, no_pictures) -> None:
    class Slowly(Wide):
        def train_dataloader(self):
            return DataLoader(Slow(torch.randn(80, 8)), batch_size=4)

    own = profiled_with_own_loader(tmp_path, Slowly())
    kinds = {kind: own.report.own.breakdown.kind(kind) for kind in KINDS}
    assert max(kinds, key=kinds.get) == DATA
    assert is_the_step(own.report.own.explained)
    (steps,) = [each.breakdown.steps for each in own.report.ranks]
    assert all(step.data > step.compute for step in steps)


def profiled_with_own_loader(folder, module):
    """Trains without dlo's StepClock: torch's own annotation of its loader shows the fetches."""
    own = Profile(wait=2, warmup=1, active=3, formats=["chrome"], machine="cpu", waits=False)
    quiet_trainer(max_steps=8, callbacks=[own], default_root_dir=folder).fit(module)
    return own


class Fails(Wide):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            raise RuntimeError("boom")
        return super().training_step(batch, batch_idx)


def test_an_error_in_the_window_leaves_no_hooks_and_no_profiler(tmp_path) -> None:
    own, module = profiled(tmp_path, Fails(), fails=True)
    assert own.report is None
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert not torch.autograd.profiler._is_profiler_enabled, "the tests below start others"


def test_windows_repeat_and_steps_of_several_batches_are_one(tmp_path, no_pictures) -> None:
    own = Profile(wait=1, warmup=1, active=1, repeat=2, machine="cpu", formats=["chrome"])
    fit(tmp_path, Wide(), batches=24, callbacks=[own], max_epochs=1, accumulate_grad_batches=2)
    names = sorted(path.name for path in (tmp_path / "profile").glob("report.*.json"))
    assert names == ["report.0.json", "report.1.json"]
    assert is_the_step(own.report.own.explained)
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank_0.1.pt.trace.json.gz").read_bytes()))
    forwards = [event for event in trace["traceEvents"] if event["name"] == "module: net.0" and event["ph"] == "X"]
    assert len([event for event in forwards if event.get("cat") == "user_annotation"]) == 2


def test_a_run_that_ends_inside_the_window_reports_what_it_has(tmp_path, no_pictures) -> None:
    own = Profile(wait=15, warmup=1, active=30, machine="cpu")
    with pytest.warns(UserWarning, match="after 4 recorded ones"):
        fit(tmp_path, Wide(), batches=20, callbacks=[own], max_epochs=1)
    assert len(own.report.own.breakdown.steps) == 4
    with pytest.warns(UserWarning, match="training ended before wait=50 steps"):
        fit(tmp_path / "short", Wide(), callbacks=[Profile(wait=50)], max_epochs=1)


@pytest.mark.slow
def test_a_compiled_model_is_profiled_without_hooks_inside(tmp_path, no_pictures) -> None:
    module = Wide()
    module.net.compile(backend="eager")
    own, _ = profiled(tmp_path, module)
    assert "operators of a compiled model cannot be seen" in own.report.text()
    assert own.report.own.waits is None
    assert is_the_step(own.report.own.explained)
    assert own.report.own.breakdown.kind(MATRIX) > 0
    assert not any(name.startswith("net") for name in own.report.own.breakdown.modules)


class Validates(Wide):
    def validation_step(self, batch, batch_idx):
        torch.randn(50_000).sort()
        super().validation_step(batch, batch_idx)


def test_a_validation_inside_the_window_is_no_part_of_a_step(tmp_path, no_pictures) -> None:
    own = Profile(wait=2, warmup=1, active=4, machine="cpu", waits=False)
    fit(tmp_path, Validates(), callbacks=[own], max_epochs=1, val_check_interval=5)
    # Both clocks leave it out; it takes longer than the steps.
    assert is_the_step(own.report.own.explained)
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank_0.0.pt.trace.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"]]
    assert names.count("dlo.mark: pause") == names.count("dlo.mark: resume") == 1


def test_ranks_and_devices_that_are_not_there_are_refused_before_a_step(tmp_path) -> None:
    with pytest.raises(DloError, match="ranks must be below 1, the number of ranks, got \\[3\\]"):
        fit(tmp_path, callbacks=[Profile(ranks=[3])])
    with pytest.raises(DloError, match="without an NVIDIA GPU, got nvtx"):
        fit(tmp_path, callbacks=[Profile(formats=["nvtx"])])


# --- Profile on two ranks: a slow loader and a slow rank are named, and a run with it equals one without -------------


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


class Faulty(Squares):
    """A net whose steps take some milliseconds, with a planted fault on rank 1."""

    def __init__(self, fault: str) -> None:
        super().__init__(*(torch.nn.Linear(256, 256) for _ in range(4)), lr=1e-3)
        self.fault = fault

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].repeat(64, 1)
        if self.global_rank == 1 and self.fault == "compute":
            for _ in range(240):
                torch.mm(torch.ones(256, 256), torch.ones(256, 256))
        if self.global_rank == 1 and self.fault == "host":
            time.sleep(0.2)
        return super().training_step((x,), batch_idx)


class SlowRows(TensorDataset):
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
        data = DataLoader(SlowRows(fault == "data" and rank == 1), batch_size=4)
        own = Profile(wait=2, warmup=1, active=4, machine="cpu", formats=["chrome"], waits=False)
        train(folder / fault, "ddp", Faulty(fault), data, [own])
        if rank == 0:
            found[fault] = json.loads((folder / fault / "profile" / "report.0.json").read_text())["stragglers"]
    one = Profile(wait=2, warmup=1, active=2, machine="cpu", formats=["chrome"], ranks=[1])
    train(folder / "one", "ddp", Faulty(""), DataLoader(SlowRows(False), batch_size=4), [one])
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


# ranges around modules: their order in forward and backward, and nothing of them in the results or afterwards


class Log:
    """Ranges as NVTX has them, by id."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._names: list[str] = []

    def begin(self, module: str, phase: str) -> int:
        name = f"{module} {phase}"
        self.events.append(("begin", name))
        self._names.append(name)
        return len(self._names) - 1

    def end(self, number: int) -> None:
        self.events.append(("end", self._names[number]))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_backward_ranges_are_in_the_order_of_backward_and_gradients_are_equal() -> None:
    model, x, log = net(), torch.randn(3, 4), Log()
    plain = gradients(model, x)
    ranges = ModuleRanges(model, log.begin, log.end)
    ranges.start()
    found = gradients(model, x)
    ranges.end_backward()
    ranges.stop()
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    begins = [name for what, name in log.events if what == "begin"]
    ends = [name for what, name in log.events if what == "end"]
    assert begins == [
        "0 forward", "1 forward", "2 forward", "2 backward", "1 backward", "0 backward",
    ]  # fmt: skip
    assert sorted(ends) == sorted(begins)  # also that of layer 0, whose input has no gradient
    assert log.events.index(("end", "2 backward")) < log.events.index(("begin", "0 backward"))
    log.events.clear()
    gradients(model, x)
    assert log.events == []


def test_hooks_are_gone_afterwards_also_after_an_error() -> None:
    model = net()

    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    handle = model[2].register_forward_pre_hook(fail)
    ranges = trace_ranges(model)
    ranges.start()
    with pytest.raises(RuntimeError, match="boom"):
        model(torch.randn(3, 4))
    ranges.stop()
    handle.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert not any(part._forward_hooks_always_called for part in model.modules())
