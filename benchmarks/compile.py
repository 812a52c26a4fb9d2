"""What compiling gains a step and costs a start: the Compile callback beside the same fit without it.

    python benchmarks/compile.py [--rounds 7] [--starts 2] [--steps 10] [--vit small|tiny]

First a ViT's training step, warm: each round fits every variant once, in a new random order, and ratios are taken
within the round; `eager again` is the control. CPU time of one thread. `small` is bound by its matrix products, 32
images of 64 x 64; `tiny` by the number of its operations, 8 images of 16 x 16.

Then the wall time from calling `fit` to the end of the first optimizer step, in fresh processes: uncompiled, with an
empty cache folder, and with the one that this filled.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import lightning as L
import timm
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from dlo_plugins.callbacks.compile import Compile

WARM = 3  # steps before the clock starts
COMPILE: dict[str, dict[str, str] | None] = {
    "eager": None,
    "eager again": None,
    "Compile, model": {"scope": "model"},
    "Compile, blocks": {"scope": "blocks"},
}


#: timm's arguments, and images and pixels of a batch.
VITS = {
    "small": ({"img_size": 64, "patch_size": 8, "embed_dim": 128, "depth": 6, "num_heads": 4}, 32, 64),
    "tiny": ({"img_size": 16, "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3}, 8, 16),
}


class Batches(torch.utils.data.Dataset):
    """The same batch over and over."""

    def __init__(self, vit: str, count: int) -> None:
        _, images, size = VITS[vit]
        self.batch, self.count = (torch.randn(images, 3, size, size), torch.randint(10, (images,))), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch


class Module(L.LightningModule):
    """A ViT of about a million parameters."""

    def __init__(self, vit: str) -> None:
        super().__init__()
        self.vit = vit
        self.net = timm.create_model("vit_tiny_patch16_224", num_classes=10, **VITS[vit][0])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Stopwatch(Callback):
    """Times what comes after ``skip`` steps."""

    def __init__(self, skip: int, clock: Callable[[], float]) -> None:
        self.skip, self.clock, self.seen, self.seconds, self.began = skip, clock, 0, 0.0, clock()

    def on_train_batch_end(self, *_: object) -> None:
        self.seen += 1
        if self.seen == self.skip:
            self.began = self.clock()
        self.seconds = self.clock() - self.began


def fit(module: Module, compile_args: dict[str, str] | None, watch: Stopwatch, steps: int) -> float:
    """Returns the seconds on the watch after a fit of so many steps."""
    callbacks = [] if compile_args is None else [Compile(**compile_args)]  # type: ignore[arg-type]
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[*callbacks, watch], **off)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(module, DataLoader(Batches(module.vit, steps), batch_size=None))
    return watch.seconds


def step_seconds(vit: str, rounds: int, steps: int, cache: str) -> dict[str, list[float]]:
    # A module keeps its compiled code from one round to the next.
    modules = {name: Module(vit) for name in COMPILE}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    seconds: dict[str, list[float]] = {name: [] for name in COMPILE}
    order = list(COMPILE)
    for turn in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            taken = fit(modules[name], COMPILE[name], Stopwatch(WARM, time.process_time), WARM + steps)
            if turn:  # The first one compiles.
                seconds[name].append(taken / steps)
    return seconds


def start_seconds(starts: int) -> dict[str, list[float]]:
    """Returns the wall seconds to the first step of each kind of start."""
    seconds: dict[str, list[float]] = {"eager": []}
    for _ in range(starts):
        seconds["eager"].append(start("eager", ""))
        for name in ("Compile, model", "Compile, blocks"):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    seconds.setdefault(f"{name}, {state}", []).append(start(name, cache))
    return seconds


def start(name: str, cache: str) -> float:
    """Returns what a fresh process prints: :func:`one_start` of it."""
    words = [sys.executable, __file__, "--start", name, "--cache", cache]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def one_start(name: str, cache: str) -> float:
    """Returns the wall seconds from calling ``fit`` to the end of the first step, which runs compiled."""
    arguments = COMPILE[name]
    return fit(Module("small"), arguments and {**arguments, "cache_dir": cache}, Stopwatch(0, time.perf_counter), 1)


def report(title: str, seconds: dict[str, list[float]], unit: float) -> dict[str, float]:
    result = {}
    base = seconds["eager"]
    print(f"\n{title:<28}{'here':>10}{'/ eager':>10}{'min':>8}{'max':>8}")
    for name, times in seconds.items():
        ratios = [one / other for one, other in zip(times, base, strict=True)]
        result[f"{title}: {name}"] = round(statistics.median(times) * unit, 3)
        result[f"{title}: {name} / eager"] = round(statistics.median(ratios), 4)
        print(
            f"{name:<28}{statistics.median(times) * unit:>10.2f}{statistics.median(ratios):>10.3f}"
            f"{min(ratios):>8.3f}{max(ratios):>8.3f}"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds of warm steps; 0 for none")
    parser.add_argument("--starts", type=int, default=2, help="fresh processes of each kind; 0 for none")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed in a round")
    parser.add_argument("--vit", choices=VITS, default="small")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if arguments.start:
        print(one_start(arguments.start, arguments.cache))
        return
    result: dict[str, float] = {}
    if arguments.rounds:
        with tempfile.TemporaryDirectory() as cache:
            seconds = step_seconds(arguments.vit, arguments.rounds, arguments.steps, cache)
        result |= report(f"step of the {arguments.vit} ViT, ms", seconds, 1000)
    if arguments.starts:
        result |= report("first step, s", start_seconds(arguments.starts), 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
