"""What does Profile cost outside its window, do its parts add up to the step, and does it name planted faults?

    python benchmarks/step_profile.py [--rounds 20] [--parts cost sum faults]

`without again` is the A/A control of the cost: a tiny MLP under dlo's own callbacks, CPU time of one thread. The sum of
the parts is over the step by the host's own clock, which the trace does not use. Faults are planted on rank 1 of two
ranks under DDP, or in the step of one process, at random sizes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, PROCESS, all_ratios, take_turns
from measuring.stopwatch import Stopwatch
from overhead import Batches, Module, mlp, silence
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_framework.watch.clock import StepClock
from dlo_plugins.profiling.operation_kinds import HIDDEN, KINDS
from dlo_plugins.profiling.profile_callback import Profile
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.llm.causal_lm import CausalLM

WARM, NEVER = 100, 10**9
STEPS = 12
WINDOW: dict[str, Any] = {"wait": 4, "warmup": 1, "active": 4, "formats": ["chrome"], "machine": "cpu"}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 2048,
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 4}
STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "one process": (1, lambda: "auto"),
    "ddp": (2, lambda: "ddp"),
    "zero3": (2, lambda: ZeroStrategy(3)),
    "fsdp": (2, FSDPStrategy),
    "mesh tp": (2, lambda: MeshStrategy(tp=2, dp_shard=1)),
    "mesh pp": (2, lambda: MeshStrategy(pp=2, dp_shard=1, micro_batches=2)),
}


# --- cost ------------------------------------------------------------------------------------------------------


def step_seconds(steps: int, callbacks: list[Callback]) -> float:
    """Returns the CPU seconds of a step under dlo's own callbacks and these."""
    net, batch = mlp()
    module, watch = Module(net, log=False), Stopwatch(PROCESS, WARM, steps)
    with tempfile.TemporaryDirectory() as folder, silence():
        every = add_default_callbacks(callbacks, run_folder=Path(folder), model=module, config="{}")
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_model_summary=False, profiler=StepClock(),
            default_root_dir=folder, callbacks=[watch, *every],
        )  # fmt: skip
        trainer.fit(module, DataLoader(Batches(batch, WARM + steps), batch_size=None))
    return watch.seconds_of_a_step


def measure_cost(record: Record, steps: int, rounds: int) -> None:
    """Adds the cost of a step outside the window."""
    variants: dict[str, Callable[[], list[Callback]]] = {
        "without": list,
        "without again": list,
        "with Profile, before its window": lambda: [Profile(wait=NEVER)],
        "with Profile, after its window": lambda: [Profile(**{**WINDOW, "wait": 3, "formats": []})],
    }
    runs = {name: (lambda make=make: step_seconds(steps, make())) for name, make in variants.items()}
    seconds = take_turns(runs, rounds, warm_up=0)
    table = Table("a step outside the window", "a tiny MLP's step without Profile", PROCESS)
    for name, values in all_ratios(seconds, "without").items():
        table.add(
            name, values, ours="Profile" in name, control=name == "without again",
            us_a_step=statistics.median(seconds[name]) * 1e6,
        )  # fmt: skip
    record.add(table)


# --- sum of the parts ------------------------------------------------------------------------------------------


class Tokens(TensorDataset):
    """Random tokens with labels."""

    def __init__(self, rows: int) -> None:
        super().__init__(torch.randint(2048, (rows, 128)))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (ids,) = super().__getitem__(index)
        return {"input_ids": ids, "labels": ids}


def task(name: str) -> tuple[Any, Any]:
    """Returns a model and its data."""
    if name == "GPT-2":
        return CausalLM(config=dict(GPT2), schedule="constant"), DataLoader(Tokens(16 * STEPS), batch_size=8)
    model = ImageClassifier("vit_tiny_patch16_224", model_args=dict(VIT), num_classes=10, schedule="constant")
    return model, DigitsData(image_size=16, batch_size=64)


def train(folder: Path, strategy: Any, ranks: int, module: Any, data: Any, callbacks: list[Callback]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    register_data_parallel()
    every = add_default_callbacks(
        callbacks, run_folder=folder, model=module, config="{}", progress_bar=False, checkpoints=False
    )
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_steps=STEPS, callbacks=every, profiler=StepClock(),
        num_sanity_val_steps=0, limit_val_batches=0, **dict.fromkeys(off, False),
    )  # fmt: skip
    use_canonical_checkpoints(trainer)
    with silence():
        trainer.fit(module, data)


def profile_all(rank: int, ranks: int, folder: Path, names: Sequence[str]) -> list[tuple[str, dict[str, Any] | None]]:
    """Returns the report of each task under each strategy of this number of ranks; None on other ranks than 0."""
    silence_lightning()
    found: list[tuple[str, dict[str, Any] | None]] = []
    for name in names:
        for strategy, (count, make) in STRATEGIES.items():
            if count != ranks:
                continue
            seed_everything(3, verbose=False)
            module, data = task(name)
            own = Profile(**WINDOW)
            train(folder / f"{name} {strategy}", make(), ranks, module, data, [own])
            found.append((f"{name}, {strategy}", own.report.to_json() if own.report is not None else None))
    leave_group()
    return found


def measure_sums(record: Record, rounds: int, names: Sequence[str], out: Path | None) -> None:
    """Adds the sum of the parts over the step."""
    sums: dict[str, list[float]] = {}
    slower: dict[str, list[float]] = {}
    last: dict[str, Any] = {}
    for _ in range(rounds):
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                reports = run_distributed(profile_all, ranks, Path(folder), names, backend=None, timeout=500)[0]
            for name, report in reports:
                assert report is not None
                last[name] = report
                for each in report["ranks"]:
                    sums.setdefault(name, []).append(sum(each["kinds"].values()) / each["step_seconds"])
                slower.setdefault(name, []).append(report["ranks"][0]["step_seconds"] / report["usual_step_seconds"])
    table = Table("sum of the parts, each rank of each round", "the step by the host's own clock", "elapsed time")
    for name, values in sums.items():
        share = {kind: seconds / last[name]["ranks"][0]["step_seconds"] for kind, seconds in
                 last[name]["ranks"][0]["kinds"].items()}  # fmt: skip
        table.add(
            name, values, ours=True, largest_error=max(abs(value - 1) for value in values),
            profiled_step_over_usual=statistics.median(slower[name]), matrix_products=share[KINDS[0]],
            collectives_exposed=share[KINDS[6]], host=share[KINDS[9]],
        )  # fmt: skip
    worst = max(abs(value - 1) for values in sums.values() for value in values)
    table.notes.append(f"largest error of all: {worst:.4%}; the bar is 2%")
    record.add(table)
    if out is not None:
        kept = ("rank", "step_seconds", "explained", "kinds", HIDDEN)
        content = {name: {"ranks": [{key: rank[key] for key in kept} for rank in report["ranks"]]}
                   for name, report in last.items()}  # fmt: skip
        out.write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {out}")


# --- planted faults --------------------------------------------------------------------------------------------


class Planted(LightningModule):
    """A net with a fault on rank 1, or in the step of one process.

    Args:
        fault: `wait`, `compute`, `host`, `data` or `none`.
        size: Seconds of the fault, approximately.
    """

    def __init__(self, fault: str, size: float) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self.fault, self.size = fault, size

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0].repeat(64, 1)).square().mean()
        if self.fault == "wait":
            loss.item()  # the planted wait
        if self.trainer.global_rank == 1 and self.fault == "compute":
            until = ELAPSED.now() + self.size
            while ELAPSED.now() < until:
                torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        if self.trainer.global_rank == 1 and self.fault == "host":
            threading.Event().wait(self.size)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Rows(TensorDataset):
    """Rows that load slowly.

    Args:
        seconds: Seconds of a row.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(torch.randn(8 * STEPS, 256))
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        threading.Event().wait(self.seconds)
        return super().__getitem__(index)


def plant(rank: int, ranks: int, folder: Path, trials: int, seed: int) -> list[dict[str, Any]]:
    """Returns what each trial's report has named."""
    silence_lightning()
    draw, found = random.Random(seed), []
    for number in range(trials):
        for fault in ("wait", "compute", "host", "data") if ranks == 2 else ("wait",):
            size = draw.uniform(0.05, 0.3)
            place = folder / f"{fault} {number}"
            data = DataLoader(Rows(size / 4 if fault == "data" and rank == 1 else 0.0), batch_size=4)
            own = Profile(**WINDOW)
            train(place, "ddp" if ranks == 2 else "auto", ranks, Planted(fault, size), data, [own])
            if rank == 0:
                assert own.report is not None
                report = own.report.to_json()
                lines = [wait["source"] for wait in report["ranks"][0]["waits"]]
                stragglers = report["stragglers"]
                named = (
                    any(line.endswith("# the planted wait") for line in lines)
                    if fault == "wait"
                    else (stragglers["slowest"], stragglers["cause"]) == (1, fault)
                )
                found.append({"fault": fault, "size": size, "named": named, "text": stragglers["text"]})
    leave_group()
    return found


def measure_faults(record: Record, trials: int) -> None:
    """Adds how many planted faults were named."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_distributed(plant, 2, Path(folder), trials, 1, backend=None, timeout=540)[0]
    table = Table("planted faults", "all of them named", "trials of 0.05 to 0.3 s each", better="higher")
    words = {"wait": "a wait for the device, by its line", "compute": "a slow rank: computation",
             "host": "a slow rank: Python", "data": "a slow loader"}  # fmt: skip
    for fault, label in words.items():
        own = [each for each in found if each["fault"] == fault]
        missed = [f"{each['size']:.2f} s: {each['text']}" for each in own if not each["named"]]
        table.add(label, [sum(each["named"] for each in own) / len(own)], bar=1.0, ours=True, trials=len(own))
        table.notes += [f"missed: {label}, {each}" for each in missed]
    record.add(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500, help="timed steps outside the window")
    parser.add_argument("--sums", type=int, default=3, help="rounds of the sums")
    parser.add_argument("--trials", type=int, default=10, help="trials of each planted fault")
    parser.add_argument("--models", nargs="+", default=["ViT", "GPT-2"], choices=["ViT", "GPT-2"])
    parser.add_argument("--parts", nargs="+", default=["cost", "sum", "faults"], choices=["cost", "sum", "faults"])
    parser.add_argument(
        "--reports", type=Path, help="file for the last reports, which the documentation's picture shows"
    )
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    record = Record.of(__file__, __doc__, options)
    if "cost" in options.parts:
        measure_cost(record, options.steps, options.rounds)
    if "sum" in options.parts:
        measure_sums(record, options.sums, options.models, options.reports)
    if "faults" in options.parts:
        measure_faults(record, options.trials)
    record.finish()


if __name__ == "__main__":
    main()
