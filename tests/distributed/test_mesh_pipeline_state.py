"""What a pipeline's last stage alone computes with, or has: statistics, outputs, counts, an epoch's short batch."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, Metric, PearsonCorrCoef
from transformers.modeling_outputs import ImageClassifierOutput

from dlo_framework import ParallelPlan, Task
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_plugins.strategies.mesh import MeshStrategy
from support import fsdp_nets

Pair = namedtuple("Pair", "logits aux")


@dataclass
class Found:
    logits: Tensor
    aux: Tensor


KINDS: dict[str, Any] = {
    "transformers": lambda logits, aux: ImageClassifierOutput(logits=logits),
    "pair": Pair,
    "dataclass": Found,
}


class Net(nn.Module):
    """Statistics in the stem, in the head, with parameters and without."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.BatchNorm1d(8, affine=False)
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.norm = nn.BatchNorm1d(8)
        self.plain = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.scale(self.stem(x))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.plain(self.norm(hidden)))
        return KINDS[self.kind](logits, logits.square().mean(-1))


class LastMean(Metric):
    """The mean over ranks of what each has seen last, which a rank that counts nothing would halve."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, values: Tensor) -> None:
        self.value = values.float().mean()

    def compute(self) -> Tensor:
        return self.value  # type: ignore[return-value]


class Classify(Task):
    """Its loss keeps a count in a buffer of the task's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("seen", torch.zeros(3))
        self.last, self.error, self.correlation = LastMean(), MeanSquaredError(), PearsonCorrCoef()

    def configure_model(self) -> None:
        if not self.has_model:
            torch.manual_seed(0)
            self.model = Net(self.kind)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("blocks.*",), stem=("stem", "scale"), head=("norm", "plain", "head"))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if self.training:
            self.seen += torch.bincount(batch[1], minlength=3)
        return nn.functional.cross_entropy(outputs.logits, batch[1])

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Any]:
        first, targets = outputs.logits[:, 0].contiguous(), batch[1].float()
        self.last.update(first)
        self.error.update(first, targets)
        self.correlation.update(first, targets)
        return {"last": self.last, "error": self.error, "correlation": self.correlation}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(size: int) -> DataLoader[Any]:
    """22 samples: with 8 in a batch, the last has 6."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(22, 6, generator=generator) * 3 + 2, torch.randint(3, (22,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=size)


def trainer(world_size: int, strategy: Any, **options: Any) -> Trainer:
    run = fsdp_nets.trainer(world_size, strategy, **{"max_epochs": 2, "limit_val_batches": 1.0, **options})
    use_canonical_checkpoints(run)
    return run


def pipeline(**options: Any) -> MeshStrategy:
    return MeshStrategy(pp=2, dp_shard=1, **options)


def statistics_of(world_size: int, strategy: Any, kind: str, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Fits with batches that go through the pipeline whole, as statistics of a batch ask for."""
    run = trainer(world_size, strategy, callbacks=[WeightEMA(0.5)])
    run.fit(Classify(kind), batches(8), batches(8))
    run.save_checkpoint(folder / f"{kind}-{world_size}.ckpt")
    return {name: float(value) for name, value in run.callback_metrics.items()}, gather_full_weights(run)


class NoOldGradients(Callback):
    """Checks, in the forward of this rank's first block, that the last step's gradients have been freed."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        blocks = pl_module.model.blocks
        own = next(block for block in blocks if next(block.parameters()).device.type != "meta")
        own.register_forward_pre_hook(lambda *_: self.check(trainer))

    def check(self, trainer: Trainer) -> None:
        groups = trainer.optimizers[0].param_groups
        stepped = [tensor for group in groups for tensor in group["params"]]
        in_model = {id(tensor) for tensor in trainer.lightning_module.parameters()}
        shares = [tensor for tensor in stepped if id(tensor) not in in_model]
        assert shares
        assert all(tensor.grad is None for tensor in shares)
        self.seen += 1


def losses_of(world_size: int, strategy: Any, loader: DataLoader[Any]) -> dict[str, Tensor]:
    task = Classify("pair")
    task.configure_model()
    for name, module in task.model.named_modules():
        if isinstance(module, nn.BatchNorm1d):  # Statistics would be of parts of a batch.
            task.model.set_submodule(name, nn.Identity())
    check = NoOldGradients()
    run = trainer(world_size, strategy, limit_val_batches=0, callbacks=[check] if world_size > 1 else [])
    run.fit(task, loader)
    assert world_size == 1 or check.seen > 1
    return gather_full_weights(run)


def on_ranks(rank: int, world_size: int, folder: str) -> Any:
    silence_lightning()
    found: dict[str, Any] = {}
    for kind in KINDS:
        found[kind] = statistics_of(world_size, pipeline(micro_batches=1), kind, Path(folder))
    for schedule in ("1F1B", "ZBV"):
        found[schedule] = losses_of(world_size, pipeline(schedule=schedule, micro_batches=8), batches(8))
    with pytest.raises(DloError, match=r"PipeDream2BW on 2 ranks cannot run .* set drop_last=True"):
        losses_of(world_size, pipeline(schedule="PipeDream2BW", micro_batches=8), batches(21))
    for hook in ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"):
        clipping = Classify("pair")
        setattr(clipping, hook, lambda *_, task=clipping, **__: nn.utils.clip_grad_norm_(task.parameters(), 1.0))
        with pytest.raises(DloError, match=r"several gradients in a hook does not support pp=2: .*gradient_clip_val"):
            trainer(world_size, pipeline(micro_batches=2), limit_val_batches=0).fit(clipping, batches(8))
    task = Classify("pair")
    task.configure_gradient_clipping = lambda optimizer, *_, **__: task.clip_gradients(optimizer, 1.0, "norm")  # type: ignore[method-assign]
    trainer(world_size, pipeline(micro_batches=2), limit_val_batches=0).fit(task, batches(8))
    again = pipeline(micro_batches=3)
    trainer(world_size, again, limit_val_batches=0).fit(task, batches(8))
    assert again.pipelined is not None
    assert again.pipelined.micro_batches == 3
    other = trainer(world_size, pipeline(micro_batches=2, schedule="GPipe"), limit_val_batches=1)
    other.validate(task, batches(8), verbose=False)  # Forward alone has no schedule.
    with pytest.raises(DloError, match=r"cut by an earlier run with schedule=1F1B, got schedule=GPipe"):
        other.fit(task, batches(8))
    leave_group()
    return found


@pytest.mark.timeout(280)
def test_what_the_last_stage_alone_has_is_as_in_one_process(tmp_path: Path) -> None:
    found = run_distributed(on_ranks, 2, str(tmp_path), backend=None, timeout=280, group_timeout=60)
    for kind in KINDS:
        measured, weights = statistics_of(1, "auto", kind, tmp_path)
        saved = {}
        for world_size in (1, 2):
            run, fresh = trainer(1, "auto"), Classify(kind)
            fresh.configure_model()
            run.validate(fresh, batches(8), ckpt_path=tmp_path / f"{kind}-{world_size}.ckpt", verbose=False)
            saved[world_size] = fresh.state_dict()
        for expected, others in ((weights, found[0][kind][1]), (saved[1], saved[2])):
            assert others.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: n + text)
        for of_rank in found:
            assert of_rank[kind][0] == pytest.approx(measured, rel=1e-4)
    expected = losses_of(1, "auto", batches(8))
    for schedule in ("1F1B", "ZBV"):
        for name, value in expected.items():
            torch.testing.assert_close(found[0][schedule][name], value, rtol=1e-4, atol=1e-6)
