"""What a training step costs above a hand-written torch loop, beside plain Lightning with the same features.

    python benchmarks/overhead.py [--rounds 20] [--model mlp|vit|both] [--wall] [--vit-steps 12]

Every round runs each variant once, in a new random order, and every ratio is taken within its round; the table
gives medians over the rounds. `loop again` is the hand-written loop a second time: how far its ratio is from 1 is
how far this machine can be trusted. The features that are on: a progress bar that draws (to a terminal that
discards), TensorBoard, the loss, lr and gradient norm logged every 50 steps, a checkpoint callback, a schedule,
and a timer or monitor of the step.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, Timer, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.watch.clock import StepClock
from dlo_plugins.callbacks.one_cycle import OneCycle

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
LOG_EVERY = 50
#: CPU time of the process: with one thread it is what a step costs, and other programs on the machine do not count.
CLOCK = time.process_time


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


class Stopwatch(Callback):
    """Times the steps between the end of warming up and the end of the run."""

    def __init__(self, warm: int) -> None:
        self.warm, self.seen, self.began, self.seconds = warm, 0, 0.0, 0.0

    def on_train_batch_end(self, *_: object) -> None:
        self.seen += 1
        if self.seen == self.warm:
            self.began = CLOCK()
        self.seconds = CLOCK() - self.began


def loop(make: Callable, warm: int, steps: int, folder: Path) -> float:
    """The hand-written loop."""
    net, batch = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    began = 0.0
    loader = DataLoader(Batches(batch, warm + steps), batch_size=None)
    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        if step == warm:
            began = CLOCK()
    return (CLOCK() - began) / steps


def fit(module: L.LightningModule, batch: tuple, warm: int, steps: int, **options: object) -> float:
    watch = Stopwatch(warm)
    options["callbacks"] = [*options.get("callbacks", []), watch]  # type: ignore[misc]
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        log_every_n_steps=LOG_EVERY,
        **options,
    )
    trainer.fit(module, DataLoader(Batches(batch, warm + steps), batch_size=None))
    return watch.seconds / steps


def plain_lightning(make: Callable, warm: int, steps: int, folder: Path) -> float:
    """Lightning with nothing on."""
    net, batch = make()
    off = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return fit(Module(net, log=False), batch, warm, steps, **off)


def full_lightning(make: Callable, warm: int, steps: int, folder: Path) -> float:
    """Lightning with the same features, from its own callbacks."""
    net, batch = make()
    callbacks = [TQDMProgressBar(), LearningRateMonitor(), Timer(), ModelCheckpoint(dirpath=folder)]
    return fit(Module(net, log=True), batch, warm, steps, logger=TensorBoardLogger(folder), callbacks=callbacks)


def dlo(make: Callable, warm: int, steps: int, folder: Path) -> float:
    """dlo as `dlo fit` sets it up, everything on."""
    net, batch = make()
    module = Module(net, log=False)
    callbacks = add_default_callbacks([OneCycle(1e-3)], run_folder=folder, model=module, config="{}")
    logger = TensorBoardLogger(folder, name="", version="", default_hp_metric=False)
    return fit(module, batch, warm, steps, logger=logger, callbacks=callbacks, profiler=StepClock())


VARIANTS: dict[str, tuple[Callable[..., float], str]] = {
    "loop": (loop, "0"),
    "loop again": (loop, "0"),
    "plain Lightning": (plain_lightning, "1"),
    "Lightning, all on": (full_lightning, "1"),
    "Lightning, all on, no NVML": (full_lightning, "0"),
    "dlo, all on": (dlo, "0"),
}


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with contextlib.redirect_stdout(Terminal()), contextlib.redirect_stderr(Terminal()):
        yield


def measure(make: Callable, rounds: int, warm: int, steps: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    order = list(VARIANTS)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            run, nvml = VARIANTS[name]
            # `import lightning` sets this to 1; dlo sets it back where there is no NVIDIA driver.
            os.environ[NVML] = nvml
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as folder, silence():
                seconds[name].append(run(make, warm, steps, Path(folder)))
    return seconds


def report(title: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    base = seconds["loop"]
    added = [full - raw for full, raw in zip(seconds["Lightning, all on"], base, strict=True)]
    print(f"\n{title}: {statistics.median(base) * 1e6:.0f} us a step by hand here")
    print(f"{'':<28}{'step / loop':>12}{'min':>8}{'max':>8}{'added / added by Lightning, all on':>36}")
    result = {}
    for name, times in seconds.items():
        ratios = [time / raw for time, raw in zip(times, base, strict=True)]
        shares = [(time - raw) / more for time, raw, more in zip(times, base, added, strict=True)]
        result[f"{title}: {name}"] = round(statistics.median(ratios), 4)
        result[f"{title}: {name}, share"] = round(statistics.median(shares), 4)
        print(
            f"{name:<28}{statistics.median(ratios):>12.3f}{min(ratios):>8.3f}{max(ratios):>8.3f}"
            f"{statistics.median(shares):>36.3f}"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", choices=["mlp", "vit", "both"], default="both")
    parser.add_argument("--wall", action="store_true", help="measure elapsed time instead of CPU time")
    parser.add_argument("--vit-steps", type=int, default=12, help="steps of the ViT in a round")
    arguments = parser.parse_args()
    if arguments.wall:
        global CLOCK
        CLOCK = time.perf_counter
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    result = {}
    if arguments.model in ("mlp", "both"):
        result |= report("tiny MLP", measure(mlp, arguments.rounds, warm=100, steps=1000))
    if arguments.model in ("vit", "both"):
        seconds = measure(vit, arguments.rounds, warm=3, steps=arguments.vit_steps)
        result |= report("small ViT, 64 x 64, batch 32", seconds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
