"""How many samples and seconds to 97% on the digits: the techniques together, beside a tuned constant rate.

    python benchmarks/race.py [--seeds 5] [--epochs 150] [--plot docs/images/race.svg]

* ``race``: configs/digits/race.yaml, as it is: OneCycle, progressive resizing, a growing batch.
* ``constant``: the same model and data at one size with batches of 64, AdamW at a constant rate that LRFinder's sweep
  suggests before the run (the sweep's time is not counted).

Each seed (of weights, of the data's order and of the split) runs both, one after the other, in processes of their own
with one thread, until the first validation at 97% or the end. Curves, medians over seeds and a JSON line. Time is CPU
time, given as ratios within a seed: samples are what a machine does not change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.watch.monitor import batch_size, data_parallel_size

ROOT = Path(__file__).resolve().parents[1]
RACE = ROOT / "configs" / "digits" / "race.yaml"
TARGET = 0.97
CURVE = "race_curve.json"


class RaceCurve(Callback):
    """Writes the validation accuracy over samples and seconds of training and validation to the run's folder."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []
        self.samples, self.began = 0, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.began = self.began or time.process_time()
        self.samples += batch_size(batch) * data_parallel_size(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.began:
            accuracy = float(trainer.callback_metrics["val_acc1"])
            seconds = time.process_time() - self.began
            self.points.append({"samples": self.samples, "seconds": seconds, "val_acc1": accuracy})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(trainer.default_root_dir, CURVE).write_text(json.dumps(self.points))


def constant(epochs: int) -> str:
    """Returns the config of the tuned constant rate: the race's model and data, and none of its techniques."""
    import yaml

    config = yaml.safe_load(RACE.read_text())
    config["trainer"]["max_epochs"] = epochs
    config["trainer"]["callbacks"] = [
        {"class_path": "LRFinder"},
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
        "--run.dir",
        str(folder / str(seed)),
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
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
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
    arguments = parser.parse_args()
    curves: dict[str, list[list[dict[str, float]]]] = {"race": [], "constant": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "constant.yaml").write_text(constant(arguments.epochs))
        for seed in range(arguments.seeds):
            order = ["race", "constant"] if seed % 2 == 0 else ["constant", "race"]
            for contestant in order:
                config = RACE if contestant == "race" else folder / "constant.yaml"
                curves[contestant].append(run(contestant, config, seed, folder))
                print(f"seed {seed}: {contestant:<9}", _line(curves[contestant][-1]), flush=True)
    found = {contestant: [to_target(curve) for curve in runs] for contestant, runs in curves.items()}
    reached = [(one, other) for one, other in zip(found["race"], found["constant"], strict=True) if one and other]
    record: dict[str, Any] = {
        "benchmark": "race",
        "target": TARGET,
        "samples": {
            contestant: [point and point["samples"] for point in points] for contestant, points in found.items()
        },
        "reached": {contestant: sum(point is not None for point in points) for contestant, points in found.items()},
        "seeds": arguments.seeds,
    }
    for key in ("samples", "seconds"):
        ratios = [one[key] / other[key] for one, other in reached]
        record[f"{key}_ratio"] = round(statistics.median(ratios), 3) if ratios else None
        record[f"{key}_ratios"] = [round(ratio, 3) for ratio in ratios]
    print(f"race over constant, median of {len(reached)} seeds where both arrive:", end=" ")
    print(f"{record['samples_ratio']} of the samples, {record['seconds_ratio']} of the time")
    if arguments.plot:
        plot(curves, arguments.plot)
    print(json.dumps(record))


def _line(curve: list[dict[str, float]]) -> str:
    point, best = to_target(curve), max(point["val_acc1"] for point in curve)
    if point is None:
        return f"not reached; best {best:.4f} in {curve[-1]['samples']:,} samples"
    return f"{TARGET:.0%} after {point['samples']:,} samples"


if __name__ == "__main__":
    main()
