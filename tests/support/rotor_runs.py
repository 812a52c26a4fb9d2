"""Short training runs with and without Rotor, whose gradients, buffers, forwards and memory tests compare."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlo_framework import Task
from dlo_framework.plan import ParallelPlan
from dlo_plugins.memory.block_survey import AllocationLog
from dlo_plugins.memory.rotor_callback import Rotor
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.trainers import quiet_trainer

ROWS, STEPS = 128, 8


class VirtualClock:
    """This process's CPU time, to which waits are added in place of sleeping: other programs do not disturb it."""

    def __init__(self) -> None:
        self.waited = 0.0

    def perf_counter(self) -> float:
        """Returns the seconds of the clock."""
        return time.process_time() + self.waited

    def sleep(self, seconds: float) -> None:
        """Adds a wait."""
        self.waited += seconds


class Block(nn.Module):
    """Residual block with a batch norm, whose statistics a forward changes, and dropout."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm, self.dropout = nn.BatchNorm1d(inner), nn.Dropout(0.1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.dropout(self.down(torch.tanh(self.norm(self.up(x)))))


class Net(nn.Module):
    """Blocks of different widths; `reads` makes the model use the output of a block between two blocks.

    `wide` gives it a stem whose backward takes more than that of any block.
    """

    def __init__(self, kind: str = "net") -> None:
        super().__init__()
        self.reads = kind == "reads"
        self.inward, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        if kind == "wide":
            self.inward = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Sigmoid(), nn.Linear(512, 32))  # type: ignore[assignment]
        self.blocks = nn.ModuleList(Block(32, inner) for inner in (64, 128, 64, 192, 64, 128, 96, 160))

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.inward(x), torch.zeros(())
        for number, block in enumerate(self.blocks):
            x = block(x, scale=0.5)
            if self.reads and number == 2:
                seen = x.mean()
        return self.head(x) + seen


class NetTask(Task):
    """Task of the small model."""

    def __init__(self, kind: str = "net") -> None:
        super().__init__()
        self.kind = kind

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = Net(self.kind)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("blocks.*",), stem=("inward",), head=("head",))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


NETS = ("net", "reads", "wide")
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 6, "num_heads": 4, "proj_drop_rate": 0.1}
COATNET = {"img_size": 32, "embed_dim": (32, 64, 128, 128), "depths": (1, 2, 2, 1), "stem_width": 16}
RESNET = {"layers": (1, 2, 2, 1), "channels": (8, 16, 16, 32), "stem_type": "deep", "stem_width": 4}
LLAMA = {
    **{"model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "attention_dropout": 0.1},
}


def make_task(kind: str) -> Any:
    """Returns a task: of the small model, or a small model of a known family."""
    if kind in NETS:
        return NetTask(kind)
    if kind == "llama":
        return CausalLM(config=dict(LLAMA), lr=1e-3, schedule="constant")
    names = {
        "vit": ("vit_tiny_patch16_224", VIT),
        "coatnet": ("coatnet_0_rw_224", COATNET),
        "resnet": ("resnet26", RESNET),
    }
    name, args = names[kind]
    return ImageClassifier(name, model_args=dict(args), num_classes=10, lr=1e-3, schedule="constant")


class Batches(LightningDataModule):
    """Random batches of a kind of task, the same in each run."""

    def __init__(self, kind: str, rows: int = ROWS, steps: int = STEPS) -> None:
        super().__init__()
        self.kind, self.rows, self.steps, self.batch_size = kind, rows, steps, rows

    def train_dataloader(self) -> Any:
        make = torch.Generator().manual_seed(5)

        def draw() -> Any:
            if self.kind == "llama":
                tokens = torch.randint(128, (self.rows, 16), generator=make)
                return {"input_ids": tokens, "labels": tokens.clone()}
            if self.kind in NETS:
                shape: tuple[int, ...] = (16,)
            else:
                shape = (3, 32, 32) if self.kind in ("coatnet", "resnet") else (3, 16, 16)
            labels = torch.randint(4, (self.rows,), generator=make)
            return torch.randn(self.rows, *shape, generator=make), labels

        return DataLoader([draw() for _ in range(self.steps)], batch_size=None)  # type: ignore[arg-type]


@dataclass
class Seen(Callback):
    """What a run did.

    Attributes:
        rotor: Rotor of the run; None without.
        gradients: Gradients at each optimizer step.
        forwards: Executed forwards of each chain in the last step.
        peak: Peak of activations in the last step.
        buffers: Buffers at the end.
    """

    rotor: Rotor | None = None
    gradients: list[Tensor] = field(default_factory=list)
    forwards: list[list[int]] = field(default_factory=list)
    peak: int = 0
    buffers: dict[str, Tensor] = field(default_factory=dict)
    _log: AllocationLog | None = None
    measures: bool = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for executed in self.rotor.executed if self.rotor else ():
            executed.reset_counts()
        if self.measures and batch_idx == STEPS - 1:
            self._log = AllocationLog()
            self._log.__enter__()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._log is not None:
            own = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.peak = self._log.usage(0, without=self._log.numbers([*own, *pl_module.parameters()])).peak
            self._log.__exit__(None, None, None)
            self._log = None
        stepped = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.gradients.append(torch.cat([gradient.flatten() for gradient in stepped]).clone())

    def on_train_batch_end(self, *_: Any) -> None:
        self.forwards = [list(executed.forwards) for executed in (self.rotor.executed if self.rotor else ())]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}


def train(
    kind: str,
    budget: str | None = None,
    measures: bool = False,
    link: str | None = None,
    **options: Any,
) -> Seen:
    """Trains a small model for a few steps.

    Args:
        kind: Kind of the task.
        budget: Budget of Rotor; None for a run without it.
        measures: Whether to measure the memory of the last step.
        link: Rate of the link to which Rotor offloads; None if it does not.
        **options: Further options of the trainer; `callbacks` come before Rotor.
    """
    seed_everything(3, workers=True, verbose=False)
    rotor = None
    if budget is not None:
        rotor = Rotor(budget) if link is None else Rotor(budget, offload=True, link=link)
    seen = Seen(rotor, measures=measures)
    callbacks = [*options.pop("callbacks", []), seen, *([rotor] if rotor else [])]
    settings = {"max_steps": STEPS, "max_epochs": 1, "limit_val_batches": 0, "default_root_dir": tempfile.mkdtemp()}
    trainer = quiet_trainer(callbacks=callbacks, **settings | options)
    trainer.fit(make_task(kind), Batches(kind))
    return seen


def assert_same(plain: Seen, found: Seen) -> None:
    """Checks that gradients and buffers are equal to the bit, and that the executed forwards are the planned ones.

    Args:
        plain: Run without Rotor.
        found: Run with it.
    """
    assert len(plain.gradients) == len(found.gradients) > 3
    assert all(map(torch.equal, plain.gradients, found.gradients))
    assert any(gradient.abs().max() > 0 for gradient in found.gradients)
    assert all(torch.equal(value, found.buffers[name]) for name, value in plain.buffers.items())
    assert found.rotor is not None
    planned = [[*plan.schedule.forwards[:-1]] for plan in found.rotor.plans]
    assert found.forwards == planned or any(plan.measured.refusal for plan in found.rotor.plans)
