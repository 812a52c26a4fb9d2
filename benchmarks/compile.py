"""What compiling gains a step and costs a start: the Compile callback beside the same fit without it.

    python benchmarks/compile.py [--rounds 7] [--starts 2] [--steps 10] [--vit small|tiny]

First a ViT's training step, warm; `eager again` is the control. CPU time of one thread. `small` is bound by its matrix
products, 32 images of 64 x 64; `tiny` by the number of its operations, 8 images of 16 x 16.

Then the wall time from calling `fit` to the end of the first optimizer step, in fresh processes: uncompiled, with an
empty cache folder, and with the one that this filled.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import warnings

import lightning as L
import timm
import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, PROCESS, Clock, all_ratios, take_turns
from measuring.stopwatch import Stopwatch
from torch import nn
from torch.utils.data import DataLoader

from dlo_plugins.compile.callback import Compile

WARM = 3  # steps before the clock starts
COMPILE: dict[str, dict[str, str] | None] = {
    "eager": None,
    "eager again": None,
    "Compile, model": {"scope": "model"},
    "Compile, blocks": {"scope": "blocks"},
}
#: Those whose first step is timed.
STARTS = ("eager", "Compile, model", "Compile, blocks")


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


def fit(module: Module, compile_args: dict[str, str] | None, watch: Stopwatch) -> float:
    """Returns the seconds of a step that the watch has taken."""
    callbacks = [] if compile_args is None else [Compile(**compile_args)]  # type: ignore[arg-type]
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[*callbacks, watch], **off)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(module, DataLoader(Batches(module.vit, watch.warm + watch.steps), batch_size=None))
    return watch.seconds_of_a_step


def step_seconds(vit: str, rounds: int, steps: int, cache: str) -> dict[str, list[float]]:
    # A module keeps its compiled code from one round to the next.
    modules = {name: Module(vit) for name in COMPILE}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache

    def timed(name: str) -> float:
        return fit(modules[name], COMPILE[name], Stopwatch(PROCESS, WARM, steps))

    # The first round compiles.
    return take_turns({name: (lambda name=name: timed(name)) for name in COMPILE}, rounds)


def start_seconds(starts: int) -> dict[str, list[float]]:
    """Returns the seconds to the first step of each kind of start."""

    def both(name: str) -> dict[str, float]:
        """An uncompiled start; or one with an empty cache folder, and one with what the first has left there."""
        if name == "eager":
            return {name: start(name, "")}
        with tempfile.TemporaryDirectory() as cache:
            return {f"{name}, {state}": start(name, cache) for state in ("cold", "warm")}

    # Each start is a process of its own: nothing is warm but the page cache, which importing torch here has filled.
    found = take_turns({name: (lambda name=name: both(name)) for name in STARTS}, starts, warm_up=0)
    return {kind: [one[kind] for one in rounds] for rounds in found.values() for kind in rounds[0]}


def start(name: str, cache: str) -> float:
    """Returns what a fresh process prints: :func:`one_start` of it."""
    words = [sys.executable, __file__, "--start", name, "--cache", cache]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def one_start(name: str, cache: str) -> float:
    """Returns the wall seconds from calling ``fit`` to the end of the first step, which runs compiled."""
    arguments = COMPILE[name]
    return fit(Module("small"), arguments and {**arguments, "cache_dir": cache}, Stopwatch(ELAPSED, 0, 1))


def table_of(title: str, seconds: dict[str, list[float]], clock: Clock) -> Table:
    """Returns the table over the uncompiled."""
    table = Table(title, "eager", clock)
    for name, values in all_ratios(seconds, "eager").items():
        ours, median = name.startswith("Compile"), statistics.median(seconds[name])
        table.add(name, values, ours=ours, control=name.endswith("again"), s=median)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds of warm steps; 0 for none")
    parser.add_argument("--starts", type=int, default=2, help="fresh processes of each kind; 0 for none")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed in a round")
    parser.add_argument("--vit", choices=VITS, default="small")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.start:
        print(one_start(options.start, options.cache))
        return
    record = Record.of(__file__, __doc__, options)
    if options.rounds:
        with tempfile.TemporaryDirectory() as cache:
            seconds = step_seconds(options.vit, options.rounds, options.steps, cache)
        record.add(table_of(f"a step of the {options.vit} ViT", seconds, PROCESS))
    if options.starts:
        record.add(table_of("from fit to the end of the first step", start_seconds(options.starts), ELAPSED))
    record.finish()


if __name__ == "__main__":
    main()
