"""Convolutional networks whose channels are divided: norms and convolutions of each channel, and runs on ranks."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan, Rule
from dlo_framework.run.resume import ExactResume
from dlo_framework.shards import get_layout
from dlo_framework.task import Task
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.tensor.block_proof import run_on_threads
from dlo_plugins.parallel.tensor.inferred_rules import infer_rules
from dlo_plugins.parallel.tensor.installation import install_plan
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.parallel.tensor.tp_planner import make_tp_plan
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from support.trainers import quiet_trainer


class Gate(nn.Module):
    """Squeeze-and-excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Inverted(nn.Module):
    def __init__(self, width: int, hidden: int, gates: bool) -> None:
        super().__init__()
        self.wide, self.norm1 = nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.each, self.norm2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden), nn.BatchNorm2d(hidden)
        self.gate = Gate(hidden) if gates else nn.Identity()
        self.narrow, self.norm3 = nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.norm2(self.each(F.silu(self.norm1(self.wide(x))))))
        return x + self.norm3(self.narrow(self.gate(hidden)))


class Grouped(nn.Module):
    """ResNeXt's bottleneck."""

    def __init__(self, width: int, hidden: int, gates: bool) -> None:
        super().__init__()
        self.wide, self.norm1 = nn.Conv2d(width, hidden, 1), nn.BatchNorm2d(hidden)
        self.each, self.norm2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=4), nn.BatchNorm2d(hidden)
        self.narrow = nn.Conv2d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.norm2(self.each(self.norm1(self.wide(x)).relu())).relu())


class Basic(nn.Module):
    def __init__(self, width: int, hidden: int, gates: bool) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, hidden, 3, padding=1), nn.BatchNorm2d(hidden)
        self.second, self.norm2 = nn.Conv2d(hidden, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm2(self.second(self.norm1(self.first(x)).relu()))


class Net(nn.Module):
    def __init__(self, kind: Any, hidden: int, gates: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(kind(8, hidden, gates) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class NetTask(Task):
    """Task of a :class:`Net`."""

    def __init__(self, kind: Any = Inverted, hidden: int = 16, gates: bool = False) -> None:
        super().__init__()
        self.kind, self.hidden, self.gates = kind, hidden, gates

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = Net(self.kind, self.hidden, self.gates)

    def example_batch(self, datamodule: Any) -> Any:
        return torch.zeros(2, 3, 6, 6), torch.zeros(2, dtype=torch.long)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


INVERTED = {"wide": "column", **dict.fromkeys(("norm1", "each", "norm2"), "per_channel"), "narrow": "row"}
GATED = {**INVERTED, "gate.reduce": "row", "gate.expand": "column"}
BASIC = {"first": "column", "norm1": "per_channel", "second": "row"}
KINDS = [(Inverted, False, INVERTED), (Inverted, True, GATED), (Basic, False, BASIC), (Grouped, False, INVERTED)]


@pytest.mark.parametrize(("kind", "gates", "expected"), KINDS)
def test_training_on_slices_of_channels(kind: Any, gates: bool, expected: dict[str, str]) -> None:
    """Rules are inferred; steps, running statistics and evaluation are those of one process."""
    meta = NetTask(kind, gates=gates).on_meta()
    found = infer_rules(meta, meta.parallel_plan())
    rules = {name: rule for name, rule in found.plan.tensor.items() if rule is not Rule.SEQUENCE}
    assert rules == {f"blocks.*.{name}": rule for name, rule in expected.items()}
    assert not found.whole

    torch.manual_seed(0)
    task = NetTask(kind, gates=gates)
    task.configure_model()
    model = task.model.double()
    before = copy.deepcopy(model)
    plan = make_tp_plan(model, TensorParallel().complete_plan(meta, meta.parallel_plan(), 2), 2)
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 3, 6, 6, generator=draw, dtype=torch.float64) for _ in range(3)]

    def train(one: Any) -> Tensor:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for x in batches:
            one(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return one.eval()(batches[0]).detach()

    expected_output = train(model)
    assert (model.blocks[0].norm1.running_mean - before.blocks[0].norm1.running_mean).abs().max() > 1e-3

    def run(communicator: Any) -> tuple[Tensor, Any]:
        own = copy.deepcopy(before)
        install_plan(own, plan, communicator)
        return train(own), own

    for rank, (output, own) in enumerate(run_on_threads(2, run)):
        torch.testing.assert_close(output, expected_output, rtol=1e-10, atol=1e-10)
        slices = get_layout(own).slices
        assert "blocks.1.norm1.running_var" in slices
        assert "blocks.1.norm1.num_batches_tracked" not in slices
        full = model.state_dict()
        for name, value in own.state_dict().items():
            wanted = slices[name].slice_tensor(full[name]) if name in slices else full[name]
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name} of {rank}: {m}")  # noqa: B023


def test_channels_that_the_ranks_do_not_divide_stay_whole() -> None:
    task = NetTask(hidden=15).on_meta()
    applier = TensorParallel()
    with pytest.raises(DloError, match=r"tp must divide the 15 .* set tp="):
        applier.complete_plan(task, task.parallel_plan(), 2)
    plan = applier.complete_plan(task, task.parallel_plan(), 3)
    assert make_tp_plan(task.model, plan, 3).regions["blocks.0"].channelwise == [
        *("blocks.0.norm1", "blocks.0.each", "blocks.0.norm2")
    ]


def test_other_norms_are_refused() -> None:
    model = NetTask().on_meta().model
    rules = {"blocks.*.wide": "column", "blocks.*.narrow": "row"}
    for more, kind in (({"blocks.*.gate": "per_channel"}, "Identity"), ({"stem": "per_channel"}, "Conv2d")):
        plan = ParallelPlan(blocks=("blocks.*",), tensor=rules | more)
        with pytest.raises(DloError, match=rf"'per_channel' must be a batch norm, .* got {kind}"):
            make_tp_plan(model, plan, 2)


# convolutional networks whose channels are divided train as one process: weights, running statistics, validation


def build(name: str = "test_efficientnet") -> tuple[ImageClassifier, DigitsData]:
    options: dict[str, Any] = {"optimizer": "sgd", "lr": 1e-2, "schedule": "constant", "log_images": 0}
    return ImageClassifier(name, num_classes=10, **options), DigitsData(image_size=32, batch_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_networks_are_one_process(ranks: int) -> None:
    """Inverted bottlenecks have batch norms, convolutions of each channel alone, and squeeze-and-excitation.

    Data parallelism is left out: there a batch norm has the statistics of a rank's samples.
    """
    strategy, options = partial(MeshStrategy, tp=ranks, dp_shard=1), {"gradient_clip_val": 0.5, "limit_val_batches": 2}
    names = ("test_efficientnet", "test_resnet", "test_byobnet")
    cases = [Case(strategy, {"name": name}, options, name=name) for name in names]
    assert_parity(build, cases, world_size=ranks, steps=3, rtol=1e-4)


def fit(world_size: int, strategy: Any, steps: int, save: Path, resume: Path | None) -> dict[str, torch.Tensor]:
    """Returns the full tensors after training."""
    seed_everything(7, workers=True, verbose=False)
    options: dict[str, Any] = {"max_steps": steps, "max_epochs": -1, "limit_val_batches": 0}
    run = quiet_trainer(devices=world_size, strategy=strategy, callbacks=[ExactResume()], **options)
    use_canonical_checkpoints(run)
    task, data = build()
    run.fit(task, datamodule=data, ckpt_path=resume)
    run.save_checkpoint(save)
    return gather_full_weights(run)


def _fit_on_slices(rank: int, world_size: int, folder: Path) -> None:
    fit(world_size, MeshStrategy(tp=2, dp_shard=1), 2, folder / "tp.ckpt", folder / "before.ckpt")


def test_checkpoints_have_running_statistics_in_full(tmp_path: Path) -> None:
    expected = fit(1, "auto", 3, tmp_path / "straight.ckpt", None)
    fit(1, "auto", 1, tmp_path / "before.ckpt", None)
    run_distributed(_fit_on_slices, 2, tmp_path, backend=None)
    found = fit(1, "auto", 3, tmp_path / "after.ckpt", tmp_path / "tp.ckpt")
    assert any("running_var" in name for name in found)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
