"""A training step of DeepSpeedBridge beside a hand-written loop over `deepspeed.initialize`, interleaved.

    python benchmarks/deepspeed_bridge.py [--ranks 2] [--rounds 40] [--stages 1 2 3] [--device cuda]

Each rank fits one model (a GPT-like transformer in single precision) with Lightning's Trainer and the bridge. Before
each of its batches, two engines of DeepSpeed's own, of the same model and configuration, step once each in a loop
written by hand, in a random order that is the same on all ranks: `bare` and `bare again`, the A/A control. The bridge's
time is all that passes between two such breaks: Lightning's loop, the fetch of the batch, forward, backward, step.
A round is a batch. Losses must be equal.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import random
import statistics
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, all_ratios
from measuring.transformer import LENGTH, VOCABULARY, Transformer
from torch import Tensor
from torch.utils.data import DataLoader

from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import silence_lightning

WARM_UP = 5
BAR = 1.03  # of the bridge's step, over the bare loop's


class Task(LightningModule):
    """The model under Lightning."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.model = Transformer(width, depth)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Bare:
    """DeepSpeed by hand."""

    def __init__(self, options: argparse.Namespace, config: dict[str, Any]) -> None:
        import deepspeed

        model = Transformer(options.width, options.depth)
        own = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**config, **own})

    def step(self, batch: Tensor) -> Tensor:
        loss = self.engine(batch.to(self.engine.device))
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


class Race(Callback):
    """Lets the bare loops step before each batch of the bridge's, and keeps everybody's times."""

    def __init__(self, options: argparse.Namespace, batches: list[Tensor]) -> None:
        self.options, self.batches = options, batches
        self.seconds: dict[str, list[float]] = {"bridge": [], "bare": [], "bare again": []}
        self.losses: dict[str, list[Tensor]] = {name: [] for name in self.seconds}
        self._mark: float | None = None
        self._random = random.Random(0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        config = dict(trainer.strategy.config)  # type: ignore[attr-defined]
        self._bare = {name: Bare(self.options, config) for name in ("bare", "bare again")}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._mark is not None:
            self.seconds["bridge"].append(self._now() - self._mark)
        for name in self._random.sample(["bare", "bare again"], 2):
            begin = self._now()
            self.losses[name].append(self._bare[name].step(self.batches[batch_idx]))
            self.seconds[name].append(self._now() - begin)
        self._mark = self._now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses["bridge"].append(outputs["loss"].detach())

    def _now(self) -> float:
        if self.options.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return ELAPSED.now()


def measure(rank: int, world_size: int, options: argparse.Namespace, stage: int) -> dict[str, Any]:
    """Returns seconds of each round and the losses, by variant; runs on each rank."""
    from dlo_plugins.deepspeed.strategy import DeepSpeedBridge

    silence_lightning()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(rank)
    count = WARM_UP + options.rounds + 1
    batches = [torch.randint(VOCABULARY, (options.batch, LENGTH), generator=generator) for _ in range(count)]
    race = Race(options, batches)
    trainer = Trainer(
        accelerator="cpu" if options.device == "cpu" else "gpu",
        devices=world_size,
        strategy=DeepSpeedBridge(stage),  # type: ignore[arg-type]
        max_steps=count,
        max_epochs=-1,
        callbacks=[race],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Task(options.width, options.depth), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {
        "seconds": {name: seconds[WARM_UP : WARM_UP + options.rounds] for name, seconds in race.seconds.items()},
        "losses": {name: torch.stack(losses).tolist() for name, losses in race.losses.items()},
    }


def table(found: dict[str, Any], stage: int) -> Table:
    """Returns a stage's table."""
    losses = found["losses"]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["bridge"], losses["bare"], strict=True))
    assert apart < 1e-5, f"the two train alike, but their losses are {apart:.1e} apart"
    made = Table(f"a step of stage {stage}", "the loop over deepspeed.initialize", ELAPSED)
    made.notes.append(f"Losses are at most {apart:.1e} apart.")
    ours, names = "dlo, DeepSpeedBridge", {"bare": "bare", "bare again": "bare again", "bridge": "dlo, DeepSpeedBridge"}
    over = all_ratios(found["seconds"], "bare")
    for name, label in names.items():
        ms = statistics.median(found["seconds"][name]) * 1e3
        bar = BAR if label == ours else None
        made.add(label, over[name], bar=bar, ours=label == ours, control=name == "bare again", ms=ms)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options, options.device)
    if not importlib.util.find_spec("deepspeed"):
        record.without("all of it", "deepspeed is not installed")
        options.stages = []
    for stage in options.stages:
        found = run_distributed(measure, options.ranks, options, stage, backend=None, timeout=3600)[0]
        record.add(table(found, stage))
    record.finish()


if __name__ == "__main__":
    main()
