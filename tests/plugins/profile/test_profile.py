"""Profile on one process: the parts add up, planted waits are named, and nothing is left behind."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.errors import DloError
from dlo_plugins.profile import callback
from dlo_plugins.profile.callback import Profile
from dlo_plugins.profile.operations import ATTENTION, DATA, KINDS, MATRIX, OPTIMIZER
from support.monitored import Net, fit, is_the_step
from support.trainers import quiet_trainer


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


def profiled(folder, module=None, callbacks=(), fails=False, **options):
    options = {"wait": 3, "warmup": 1, "active": 4, "machine": "cpu", **options}
    own = Profile(**options)
    module = module or Wide()
    if fails:
        with pytest.raises(RuntimeError, match="boom"):
            fit(folder, module, callbacks=[own, *callbacks], max_epochs=1, enable_progress_bar=False)
    else:
        fit(folder, module, callbacks=[own, *callbacks], max_epochs=1, enable_progress_bar=False)
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
