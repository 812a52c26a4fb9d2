"""How many samples and seconds to 97% on the digits: the techniques together, beside LRFinder's constant rate.

    python benchmarks/race.py [--seeds 5] [--epochs 150] [--plot docs/images/race.svg]

* ``race``: configs/digits/race.yaml, unchanged: OneCycle, progressive resizing, a growing batch.
* ``constant``: the same model and data at one size with batches of 64, AdamW at a constant rate that LRFinder's sweep
  suggests before the run (the sweep's time is not counted).

Each seed (of weights, of the data's order and of the split) runs both, one after the other, in processes of their own
with one thread, until the first validation at 97% or the end. A round is a seed. Time is CPU time; samples are what a
machine does not change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS, ratios, take_turns

from dlo_framework.batches import batch_size
from dlo_framework.watch.monitor import data_parallel_size

ROOT = Path(__file__).resolve().parents[1]
RACE = ROOT / "configs" / "digits" / "race.yaml"
TARGET = 0.97
CURVE = "race_curve.json"
RACE_BAR = 1.0  # fewer samples, and less time


class RaceCurve(Callback):
    """Writes the validation accuracy over samples and seconds of training and validation to the run's folder."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self.samples, self.began = 0, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.began = self.began or PROCESS.now()
        self.samples += batch_size(batch) * data_parallel_size(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.began:
            accuracy = float(trainer.callback_metrics["val_acc1"])
            seconds = PROCESS.now() - self.began
            self.points.append({"samples": self.samples, "seconds": seconds, "val_acc1": accuracy})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(trainer.default_root_dir, CURVE).write_text(json.dumps(self.points))


def constant(epochs: int) -> str:
    """Returns the config of the constant rate: the race's model and data, and none of its techniques."""
    import yaml

    config = yaml.safe_load(RACE.read_text())
    config["trainer"]["max_epochs"] = epochs
    config["trainer"]["callbacks"] = [
        {"class_path": "LRFinder", "init_args": {"suggestion": "valley"}},
        {"class_path": "TimeToTarget", "init_args": {"metric": "val_acc1", "target": TARGET}},
    ]
    config["data"]["init_args"]["batch_size"] = 64
    return str(yaml.safe_dump(config))


def run(name: str, config: Path, seed: int, folder: Path) -> list[dict[str, float]]:
    """Runs one contestant and returns its curve."""
    words = [
        sys.executable,
        "-m",
        "dlo_framework",
        "fit",
        "--config",
        str(config),
    ]
    words += [
        "--run.dir",
        str(folder / str(seed)),
        "--run.name",
        name,
        "--seed_everything",
        str(seed),
        "--data.init_args.seed",
        str(seed),
    ]
    words += ["--plugins", str(Path(__file__).resolve()), "--trainer.callbacks+=RaceCurve"]
    # The run imports this file by its path, and this file imports its neighbours.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    curve: list[dict[str, float]] = json.loads((folder / str(seed) / name / "version_0" / CURVE).read_text())
    return curve


def to_target(curve: list[dict[str, float]]) -> dict[str, float] | None:
    """Returns the first point at the target; None where there is none."""
    return next((point for point in curve if point["val_acc1"] >= TARGET), None)


def plot(curves: dict[str, list[list[dict[str, float]]]], path: Path) -> None:
    """Draws every run's curve over samples and over seconds, as far as its target."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "dlo", "font.size": 9, "text.color": "#808080", "axes.labelcolor": "#808080"}
    plt.rcParams |= {"axes.edgecolor": "#808080", "xtick.color": "#808080", "ytick.color": "#808080"}
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    for name, colour in (("race", "#3f6ad8"), ("constant", "#d9822b")):
        for number, curve in enumerate(curves[name]):
            for axes, key, unit in zip(panels, ("samples", "seconds"), (1000, 1), strict=True):
                xs, ys = [point[key] / unit for point in curve], [point["val_acc1"] for point in curve]
                axes.plot(xs, ys, color=colour, linewidth=1, alpha=0.8, label=name if number == 0 else None)
                axes.plot(xs[-1:], ys[-1:], "o", color=colour, markersize=4)
    for axes, label in zip(panels, ("thousand samples", "CPU seconds"), strict=True):
        axes.axhline(TARGET, color="#808080", linewidth=0.8, linestyle=":")
        axes.set(xlabel=label, ylim=(0.8, 0.985), xlim=(0, None))
        axes.patch.set_alpha(0)
    panels[0].set_ylabel("validation accuracy")
    panels[0].legend(frameon=False, loc="lower right")
    figure.patch.set_alpha(0)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=150, help="the most that the constant rate may take")
    parser.add_argument("--plot", type=Path)
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "constant.yaml").write_text(constant(options.epochs))
        configs, seeded = {"race": RACE, "constant": folder / "constant.yaml"}, {}

        def contend(contestant: str) -> list[dict[str, float]]:
            curve = run(contestant, configs[contestant], seeded["at"], folder)
            print(f"seed {seeded['at']}: {contestant:<9}", _line(curve), flush=True)
            return curve

        curves = take_turns(
            {name: (lambda name=name: contend(name)) for name in configs},
            options.seeds,
            warm_up=0,
            before_round=lambda number: seeded.update(at=number),
        )
    for title, key, clock in (("samples", "samples", "samples, counted"), ("time", "seconds", PROCESS.name)):
        told = table(f"{title} to {TARGET:.0%}", key, clock, curves)
        if told is None:
            record.without(f"{title} to {TARGET:.0%}", f"on no seed did both arrive within {options.epochs} epochs")
        else:
            record.add(told)
    if options.plot:
        plot(curves, options.plot)
    record.finish()


def table(title: str, key: str, clock: str, curves: dict[str, list[list[dict[str, float]]]]) -> Table | None:
    """Returns the table of one quantity at the target, over the seeds on which both arrive; None if there are none."""
    found = {contestant: [to_target(curve) for curve in runs] for contestant, runs in curves.items()}
    both = [(one, other) for one, other in zip(found["race"], found["constant"], strict=True) if one and other]
    if not both:
        return None
    made = Table(title, "the constant rate that LRFinder suggests", clock)
    sides = {"constant": [other[key] for _, other in both], "race": [one[key] for one, _ in both]}
    for contestant, of_one in sides.items():
        ours, arrived = contestant == "race", sum(point is not None for point in found[contestant])
        columns = {"arrived": f"{arrived} of {len(found[contestant])} seeds", key: statistics.median(of_one)}
        over = ratios(of_one, sides["constant"])
        made.add("dlo, race" if ours else "constant", over, bar=RACE_BAR if ours else None, ours=ours, **columns)
    return made


def _line(curve: list[dict[str, float]]) -> str:
    point, best = to_target(curve), max(point["val_acc1"] for point in curve)
    if point is None:
        return f"not reached; best {best:.4f} in {curve[-1]['samples']:,} samples"
    return f"{TARGET:.0%} after {point['samples']:,} samples"


if __name__ == "__main__":
    main()
