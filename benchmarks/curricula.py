"""Does a schedule of what is trained save CPU time to the same accuracy or perplexity, beside the run without it?

    python benchmarks/curricula.py [--seeds 5] [--text-seeds 5] [--runs runs.jsonl] [--plot curves.png]

* images: the digits quick start's ViT with 12 blocks, until its last accuracy.
* text: the text quick start's Llama, until its last perplexity. A schedule that trains on fewer tokens in a step has
  more steps, so that all runs see as many tokens.

Per seed (of weights and of the order of the data) the plain run comes first, and then its second measurement and the
contestants, in a random order. Each has the plain run's options, and its learning-rate schedule over its own length.
Time is the process's CPU time in training, without validation. The time to the target is interpolated between
validations; a run that does not reach it counts as the slowest, and the table says how many did.

`--contestants "text/lengths, truncated"` runs one comparison. `--runs FILE` writes each finished run to the file, and
reads those of the same seeds and lengths from it: a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_plugins.callbacks.difficulty_order import DifficultyOrder
from dlo_plugins.callbacks.freeze import Freeze
from dlo_plugins.callbacks.layer_drop import LayerDrop
from dlo_plugins.callbacks.one_cycle import OneCycle
from dlo_plugins.callbacks.sequence_length import SequenceLength
from dlo_plugins.callbacks.token_drop import TokenDrop
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.llm.causal_lm import CausalLM
from dlo_tasks.llm.text_data import TextData

ROOT = Path(__file__).resolve().parents[1]
#: Bars of the ratios: layer drop's time per sample, the length curriculum's time to the plain run's perplexity.
LAYER_DROP, LENGTHS = 0.85, 0.75
BLOCKS = 12


@dataclass
class Curve:
    """Validations of a run.

    Attributes:
        seconds: CPU seconds of training at each validation.
        values: Metric at each validation.
        samples: Number of samples or tokens that the run has trained on.
    """

    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    samples: int = 0

    def time_to(self, target: float, better: Callable[[float, float], bool]) -> float | None:
        """Returns the CPU seconds at which the metric reaches a target; None if it does not.

        Args:
            target: Value to reach.
            better: Function of a value and the target that returns whether the value reaches it.
        """
        pairs = list(zip(self.seconds, self.values, strict=True))
        for number, (at, value) in enumerate(pairs):
            if better(value, target):
                if number == 0:
                    return at
                before, last = pairs[number - 1]
                return before + (at - before) * (target - last) / (value - last)
        return None


class Watch(Callback):
    """Measures the CPU time of training, and notes the metric of each validation."""

    def __init__(self, metric: str, count: Callable[[Any], int]) -> None:
        self.metric, self.count, self.curve = metric, count, Curve()
        self._spent, self._since = 0.0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._since = PROCESS.now()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.curve.samples += self.count(batch)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._spent += PROCESS.now() - self._since

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.curve.seconds.append(self._spent)
        self.curve.values.append(float(trainer.callback_metrics[self.metric]))
        self._since = PROCESS.now()


def configured(name: str) -> dict[str, Any]:
    """Returns a recipe of configs/."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "configs" / name).read_text())
    return found


def images(seed: int, epochs: int, callbacks: list[Callback], factor: float, folder: Path) -> Curve:
    """Trains the digits' ViT once."""
    init = configured("quickstart.yaml")["model"]["init_args"]
    init["model_args"]["depth"] = BLOCKS
    task = ImageClassifier(**init, log_images=0)
    data = DigitsData(image_size=16, batch_size=64, seed=seed)
    watch = Watch("val_acc1", lambda batch: len(batch[0]))
    limits = {"max_epochs": epochs, "check_val_every_n_epoch": max(1, epochs // 30)}
    return run(task, data, [OneCycle(max_lr=1.5e-3), *callbacks], watch, limits, seed, folder)


def text(seed: int, steps: int, callbacks: list[Callback], factor: float, folder: Path) -> Curve:
    """Trains the text quick start's Llama once, for a factor of the steps."""
    init = configured("llm/quickstart.yaml")["model"]["init_args"]
    for name in ("prompts", "sampling"):
        init.pop(name)
    init["warmup_steps"] = steps // 10
    data = TextData(seq_len=256, batch_size=4, seed=seed)
    watch = Watch("val_loss", lambda batch: int(batch["input_ids"].numel()))
    total = round(steps * factor)
    limits = {"max_steps": total, "val_check_interval": max(1, total // 12), "limit_val_batches": 16}
    return run(CausalLM(**init), data, callbacks, watch, {**limits, "gradient_clip_val": 1.0}, seed, folder)


def run(
    task: Any, data: Any, callbacks: list[Callback], watch: Watch, limits: dict[str, Any], seed: int, folder: Path
) -> Curve:
    """Trains once, and returns the curve of the validations."""
    seed_everything(seed, workers=True, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[*callbacks, watch],
        **limits,
    )
    use_canonical_checkpoints(trainer)
    trainer.fit(task, datamodule=data)
    return watch.curve


@dataclass(frozen=True)
class Contestant:
    """One schedule.

    Attributes:
        make: Function that makes the callbacks.
        factor: Number of steps relative to the plain run's, for as many tokens.
        bar_per_sample: Bar of the time per sample, relative to the plain run's.
        bar_to_target: Bar of the time to the plain run's last metric.
    """

    make: Callable[[], list[Callback]]
    factor: float = 1.0
    bar_per_sample: float | None = None
    bar_to_target: float | None = None


#: A quarter of the steps with 64 tokens, a quarter with 128 and a half with 256: 176 on average.
_TRUNCATED = {0: 64, "25%": 128, "50%": 256}
CONTESTANTS: dict[str, dict[str, Contestant]] = {
    "images": {
        "layer drop": Contestant(lambda: [LayerDrop(seed=1)], bar_per_sample=LAYER_DROP),
        "token drop": Contestant(lambda: [TokenDrop(0.5, multiple=1)]),
        "freeze out": Contestant(lambda: [Freeze(t0=0.8)]),
    },
    "text": {
        "layer drop": Contestant(lambda: [LayerDrop(seed=1)]),
        "lengths, split": Contestant(lambda: [SequenceLength(lengths={0: 64, "30%": 128, "60%": 256})]),
        "lengths, truncated": Contestant(
            lambda: [SequenceLength(lengths=_TRUNCATED, method="truncate")], 256 / 176, bar_to_target=LENGTHS
        ),
        "token drop": Contestant(lambda: [TokenDrop(0.5)]),
        "rarity": Contestant(lambda: [DifficultyOrder(metric="rarity", start=0.3, until="1 epochs")]),
    },
}
PLAIN, AGAIN = "plain", "plain again"
KINDS: dict[str, tuple[Any, Callable[[float, float], bool]]] = {
    "images": (images, lambda value, target: value >= target),
    "text": (text, lambda value, target: value <= target),
}


class FinishedRuns:
    """Curves of finished runs, in a file with one JSON object a line.

    Args:
        path: Path of the file, which need not exist; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._curves: dict[str, Curve] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            entry = json.loads(line)
            self._curves[entry["run"]] = Curve(**entry["curve"])

    def get(self, run: str, train: Callable[[], Curve]) -> Curve:
        """Returns the curve of a run, which is trained if it is not in the file.

        Args:
            run: Name of the run, with all that it depends on.
            train: Function that trains it.
        """
        if run not in self._curves:
            self._curves[run] = curve = train()
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps({"run": run, "curve": asdict(curve)}) + "\n")
        return self._curves[run]


def contend(
    kind: str, seeds: int, length: int, names: list[str], folder: Path, finished: FinishedRuns
) -> dict[str, list[Curve]]:
    """Trains the plain run and the contestants for each seed."""
    train, _ = KINDS[kind]
    found: dict[str, list[Curve]] = {name: [] for name in (PLAIN, AGAIN, *names)}
    for seed in range(1, seeds + 1):
        order = [AGAIN, *names]
        random.Random(seed).shuffle(order)
        for name in (PLAIN, *order):
            one = CONTESTANTS[kind].get(name, Contestant(list))
            start = functools.partial(train, seed, length, one.make(), one.factor, folder)
            curve = finished.get(f"{kind}/{name}, length {length}, seed {seed}", start)
            found[name].append(curve)
            print(f"{kind}, seed {seed}: {name} {curve.values[-1]:.4f} in {curve.seconds[-1]:.1f} s", flush=True)
    return found


def tables(kind: str, found: dict[str, list[Curve]]) -> list[Table]:
    """Returns the time per sample, and the time to the plain run's last metric."""
    _, better = KINDS[kind]
    unit = "sample" if kind == "images" else "token"
    speed = Table(f"{kind}: CPU time per {unit}", "the plain run's", f"CPU seconds per {unit}")
    reach = Table(f"{kind}: CPU time to the plain run's last metric", "the plain run's", "CPU seconds")
    for name, curves in found.items():
        one = CONTESTANTS[kind].get(name, Contestant(list))
        ours, control = name in CONTESTANTS[kind], name == AGAIN
        last = sum(curve.values[-1] for curve in curves) / len(curves)
        pairs = list(zip(curves, found[PLAIN], strict=True))
        rates = [curve.seconds[-1] / curve.samples / (base.seconds[-1] / base.samples) for curve, base in pairs]
        speed.add(name, rates, bar=one.bar_per_sample, ours=ours, control=control, mean_last=last)
        times = []
        for curve, base in pairs:
            at, wanted = (one.time_to(base.values[-1], better) for one in (curve, base))
            assert wanted is not None
            times.append(math.inf if at is None else at / wanted)
        count = sum(map(math.isfinite, times))
        if count:
            reached = f"{count} of {len(curves)}"
            reach.add(name, times, bar=one.bar_to_target, ours=ours, control=control, reached=reached)
        else:
            reach.notes.append(f"{name}: none of {len(curves)} runs reached it")
    return [speed, reach]


def draw(found: dict[str, dict[str, list[Curve]]], path: Path) -> None:
    """Draws the metric over the CPU time, one line a run."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(6 * len(found), 4), squeeze=False)
    for axis, (kind, runs) in zip(axes[0], found.items(), strict=True):
        for number, (name, curves) in enumerate(runs.items()):
            for which, curve in enumerate(curves):
                label = name if which == 0 else None
                axis.plot(curve.seconds, curve.values, color=f"C{number}", label=label, linewidth=1)
        axis.set(title=kind, xlabel="CPU seconds of training", ylabel="accuracy" if kind == "images" else "loss")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--text-seeds", type=int, default=5)
    parser.add_argument("--text-steps", type=int, default=420)
    parser.add_argument(
        "--contestants", nargs="+", default=None, help="names such as 'images/layer drop'; by default all"
    )
    parser.add_argument("--runs", type=Path, default=None, help="file of finished runs, which are not repeated")
    parser.add_argument("--plot", type=Path, default=None, help="file of the curves")
    options = parse_options(parser, __file__)
    known = [f"{kind}/{name}" for kind, names in CONTESTANTS.items() for name in names]
    for name in options.contestants or ():
        if name not in known:
            parser.error(f"--contestants must be among {', '.join(map(repr, known))}, got {name!r}")
    finished = FinishedRuns(options.runs)
    torch.set_num_threads(1)
    record = Record.of(__file__, __doc__, options)
    found: dict[str, dict[str, list[Curve]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, seeds, length in (
            ("images", options.seeds, options.epochs),
            ("text", options.text_seeds, options.text_steps),
        ):
            names = [
                key for key in CONTESTANTS[kind] if not options.contestants or f"{kind}/{key}" in options.contestants
            ]
            if not seeds or not names:
                continue
            found[kind] = contend(kind, seeds, length, names, Path(name), finished)
            for table in tables(kind, found[kind]):
                record.add(table)
    if options.plot is not None:
        draw(found, options.plot)
    record.finish()


if __name__ == "__main__":
    main()
