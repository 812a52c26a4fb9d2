"""What a training step costs above a hand-written torch loop, beside plain Lightning with the same features.

    python benchmarks/overhead.py [--rounds 20] [--model mlp|vit|both] [--wall] [--vit-steps 12]

`loop again` is the hand-written loop a second time, the A/A control. The features that are on: a progress bar that
draws (to a terminal that discards), TensorBoard, the loss, lr and gradient norm logged every 50 steps, a checkpoint
callback, a schedule, and a timer or monitor of the step. Where a step is short, what it adds to the loop's is held
against what Lightning adds with the same features.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, Timer, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, PROCESS, Clock, all_ratios, take_turns
from measuring.stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.watch.monitor import StepClock
from dlo_plugins.schedules.lr_curves import OneCycle

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
LOG_EVERY = 50


class Terminal(io.StringIO):
    """A terminal that draws nothing, so that bars do their work and the table stays readable."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


class Batches(torch.utils.data.Dataset):
    """The same batch over and over: loading costs nothing, so that what is left is the step."""

    def __init__(self, batch: tuple[torch.Tensor, torch.Tensor], count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return net, (torch.randn(32, 32), torch.randint(10, (32,)))


def vit() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    import timm

    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, embed_dim=128, depth=6, num_heads=4, num_classes=10
    )
    return net, (torch.randn(32, 3, 64, 64), torch.randint(10, (32,)))


class Module(L.LightningModule):
    """The same step as the loop's; with ``log`` it logs as a user of plain Lightning would."""

    def __init__(self, net: nn.Module, log: bool) -> None:
        super().__init__()
        self.net, self.logs = net, log

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.logs and self.trainer.global_step % LOG_EVERY == 0:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            self.log("train/grad_norm", norm)

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        if not self.logs:
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10**6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass
class Work:
    """What a variant trains, and for how long.

    Attributes:
        make: Function that returns the network and its batch.
        warm: Steps before the clock starts.
        steps: Number of timed steps.
        clock: Clock to use.
    """

    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]]
    warm: int
    steps: int
    clock: Clock


def loop(work: Work, folder: Path) -> float:
    """The hand-written loop."""
    net, batch = work.make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    began = 0.0
    loader = DataLoader(Batches(batch, work.warm + work.steps), batch_size=None)
    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        if step == work.warm:
            began = work.clock.mark()
    return work.clock.between(began, work.clock.mark()) / work.steps


def fit(module: L.LightningModule, batch: tuple, work: Work, **options: object) -> float:
    watch = Stopwatch(work.clock, work.warm, work.steps)
    options["callbacks"] = [*options.get("callbacks", []), watch]  # type: ignore[misc]
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        log_every_n_steps=LOG_EVERY,
        **options,
    )
    trainer.fit(module, DataLoader(Batches(batch, work.warm + work.steps), batch_size=None))
    return watch.seconds_of_a_step


def plain_lightning(work: Work, folder: Path) -> float:
    """Lightning with nothing on."""
    net, batch = work.make()
    off = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return fit(Module(net, log=False), batch, work, **off)


def full_lightning(work: Work, folder: Path) -> float:
    """Lightning with the same features, from its own callbacks."""
    net, batch = work.make()
    callbacks = [TQDMProgressBar(), LearningRateMonitor(), Timer(), ModelCheckpoint(dirpath=folder)]
    return fit(Module(net, log=True), batch, work, logger=TensorBoardLogger(folder), callbacks=callbacks)


def dlo(work: Work, folder: Path) -> float:
    """dlo as `dlo fit` sets it up, everything on."""
    net, batch = work.make()
    module = Module(net, log=False)
    callbacks = add_default_callbacks([OneCycle(1e-3)], run_folder=folder, model=module, config="{}")
    logger = TensorBoardLogger(folder, name="", version="", default_hp_metric=False)
    return fit(module, batch, work, logger=logger, callbacks=callbacks, profiler=StepClock())


BASE, FULL, OURS = "loop", "Lightning, all on", "dlo, all on"
#: What is to be reached: a small ViT's step over the loop's, and a tiny MLP's share of what Lightning adds.
STEP_BAR, ADDED_BAR = 1.03, 0.6
#: A variant, and what it finds in the environment.
VARIANTS: dict[str, tuple[Callable[[Work, Path], float], str]] = {
    BASE: (loop, "0"),
    "loop again": (loop, "0"),
    "plain Lightning": (plain_lightning, "1"),
    FULL: (full_lightning, "1"),
    "Lightning, all on, no NVML": (full_lightning, "0"),
    OURS: (dlo, "0"),
}


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with contextlib.redirect_stdout(Terminal()), contextlib.redirect_stderr(Terminal()):
        yield


def timed(name: str, work: Work) -> float:
    """Returns the seconds of a step."""
    run, nvml = VARIANTS[name]
    # `import lightning` sets this to 1; dlo resets it on machines without an NVIDIA driver.
    os.environ[NVML] = nvml
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, silence():
        return run(work, Path(folder))


def measure(work: Work, rounds: int) -> dict[str, list[float]]:
    # Each variant warms up by itself.
    return take_turns({name: (lambda name=name: timed(name, work)) for name in VARIANTS}, rounds, warm_up=0)


def steps_table(title: str, seconds: dict[str, list[float]], clock: Clock, bar: float | None) -> Table:
    """Returns the table of whole steps."""
    table = Table(f"{title}: a training step", "the hand-written loop's step", clock)
    for name, values in all_ratios(seconds, BASE).items():
        table.add(
            name,
            values,
            bar=bar if name == OURS else None,
            ours=name == OURS,
            control=name == "loop again",
            us_a_step=statistics.median(seconds[name]) * 1e6,
        )
    return table


def added_table(title: str, seconds: dict[str, list[float]], clock: Clock) -> Table:
    """Returns the table of what is added to the loop's step."""
    added = {name: [one - raw for one, raw in zip(of, seconds[BASE], strict=True)] for name, of in seconds.items()}
    table = Table(f"{title}: what is added to the loop's step", f"what {FULL}, adds", clock)
    for name, values in all_ratios({name: of for name, of in added.items() if name != BASE}, FULL).items():
        bar = ADDED_BAR if name == OURS else None
        table.add(name, values, bar=bar, ours=name == OURS, control=name == "loop again")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", choices=["mlp", "vit", "both"], default="both")
    parser.add_argument("--wall", action="store_true", help="measure elapsed time instead of CPU time")
    parser.add_argument("--vit-steps", type=int, default=12, help="steps of the ViT in a round")
    options = parse_options(parser, __file__)
    clock = ELAPSED if options.wall else PROCESS
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    record = Record.of(__file__, __doc__, options)
    if options.model in ("mlp", "both"):
        seconds = measure(Work(mlp, 100, 1000, clock), options.rounds)
        record.add(steps_table("tiny MLP", seconds, clock, None))
        record.add(added_table("tiny MLP", seconds, clock))
    if options.model in ("vit", "both"):
        seconds = measure(Work(vit, 3, options.vit_steps, clock), options.rounds)
        record.add(steps_table("small ViT, 64 x 64, batch 32", seconds, clock, STEP_BAR))
    record.finish()


if __name__ == "__main__":
    main()
