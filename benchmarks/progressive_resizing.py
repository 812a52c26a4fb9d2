"""How many images a second at each size, and what growing the images saves at equal accuracy.

    python benchmarks/progressive_resizing.py [--rounds 7] [--seeds 5] [--epochs 60] [--no-speed] [--schedule JSON]

**Speed**, one thread, CPU time of the process: images a second that ImageFolderData makes of JPEGs of 500 x 400
(decode, crop, flip, normalise), that DigitsData makes, and that a training step of a small ViT (patch 16, width 192,
depth 4) takes, by size; rounds are interleaved in random order, and medians given. The model is built for the largest
size, so that its position embedding is interpolated at all others. `224 again` is the A/A control.

**Savings**, the digits recipe of configs/digits: the same run with the images at 16 pixels throughout, and with
ProgressiveResizing, for several seeds of weights, order and split. CPU time of training, validation left out, and the
validation accuracy after the last epoch; differences are taken within a seed. The roofline of the saving is that of the
pixels: the mean area of an image over that of the last size, which is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from data_path import write_jpegs
from lightning.pytorch import Callback, Trainer, seed_everything
from overhead import silence

from dlo_framework.model_sizes import accept_any_size
from dlo_plugins.callbacks.one_cycle import OneCycle
from dlo_plugins.callbacks.progressive_resizing import ProgressiveResizing
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.imagenet.folder import ImageFolderData

SIZES = (128, 160, 192, 224)
DIGITS = (8, 12, 16)
BATCH, BATCHES = 16, 2  # of a measurement
SCHEDULE = '{"0": 12, "60%": 16}'  # of configs/digits/progressive_resizing.yaml
CLOCK = time.process_time

Schedule = dict[str | float, int]


# --- speed -------------------------------------------------------------------------------------------------


def draining(module: ImageFolderData | DigitsData, size: int) -> Callable[[], int]:
    """Returns what makes an epoch of batches at a size, and counts the images."""
    module.image_size_at = lambda at: size
    loader = module.train_dataloader()

    def run() -> int:
        return sum(len(module.on_after_batch_transfer(batch, 0)[1]) for batch in loader)

    return run


def stepping(size: int) -> Callable[[], int]:
    """Returns what takes a few training steps at a size."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=SIZES[-1], depth=4, num_classes=100)
    accept_any_size(model)
    optimizer = torch.optim.AdamW(model.parameters())
    images, targets = torch.randn(BATCH, 3, size, size), torch.randint(100, (BATCH,))

    def run() -> int:
        for _ in range(BATCHES):
            torch.nn.functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return BATCH * BATCHES

    return run


def speeds(root: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Returns images per CPU-second by what makes or takes them, and by size."""
    runs: dict[tuple[str, str], Callable[[], int]] = {}
    for name in [*map(str, SIZES), f"{SIZES[-1]} again"]:
        size = int(name.split()[0])
        jpegs = ImageFolderData(str(root), image_size=size, batch_size=BATCH, num_workers=0)
        runs["JPEG", name], runs["ViT step", name] = draining(jpegs, size), stepping(size)
    for size in DIGITS:
        runs["digits", str(size)] = draining(DigitsData(image_size=16), size)
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for run in runs.values():
        run()  # warm up
    for _ in range(rounds):
        for key in random.sample(list(runs), len(runs)):
            start = CLOCK()
            count = runs[key]()
            rates[key].append(count / (CLOCK() - start))
    found: dict[str, dict[str, float]] = {}
    for (what, name), values in rates.items():
        found.setdefault(what, {})[name] = round(statistics.median(values), 1)
    return found


# --- savings -----------------------------------------------------------------------------------------------


class Stopwatch(Callback):
    """Adds up the CPU time of training, without validation."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        self._began = CLOCK()

    def on_validation_start(self, trainer: Trainer, pl_module: object) -> None:
        self.seconds += CLOCK() - self._began

    def on_validation_end(self, trainer: Trainer, pl_module: object) -> None:
        self._began = CLOCK()

    def on_train_end(self, trainer: Trainer, pl_module: object) -> None:
        self.seconds += CLOCK() - self._began


def train(seed: int, epochs: int, schedule: Schedule | None) -> tuple[float, float]:
    """Returns the CPU seconds of training and the accuracy after it."""
    with silence():
        return _train(seed, epochs, schedule)


def _train(seed: int, epochs: int, schedule: Schedule | None) -> tuple[float, float]:
    seed_everything(seed, verbose=False)
    model = {"patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3, "global_pool": "avg", "class_token": False}
    task = ImageClassifier(
        "vit_tiny_patch16_224",
        model,
        optimizer="adamw",
        weight_decay=0.3,
        label_smoothing=0.1,
        schedule="constant",
        log_images=0,
    )
    watch = Stopwatch()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        num_sanity_val_steps=0,
        callbacks=[OneCycle(1.5e-3), watch, *([ProgressiveResizing(schedule)] if schedule else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=DigitsData(image_size=16, batch_size=64, seed=seed))
    return watch.seconds, float(trainer.callback_metrics["val_acc1"])


def pixels(epochs: int, schedule: Schedule) -> float:
    """Returns the mean area of an image under the schedule, over that of the last size."""
    callback = ProgressiveResizing(schedule)
    sizes = [callback.steps[point] for point in callback.steps]
    points = [point.epochs(1, epochs) for point in callback.steps] + [float(epochs)]
    spans = zip(sizes, points, points[1:], strict=False)
    return sum(size**2 * (past - first) for size, first, past in spans) / sizes[-1] ** 2 / epochs


def savings(seeds: int, epochs: int, schedule: Schedule) -> dict[str, float]:
    """Returns medians and means over the seeds; the two runs of a seed are next to each other, in turns first."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    accuracy: dict[bool, list[float]] = {False: [], True: []}
    train(0, 1, schedule)  # warm up
    for seed in range(seeds):
        for grow in (False, True) if seed % 2 else (True, False):
            took, reached = train(seed, epochs, schedule if grow else None)
            seconds[grow].append(took)
            accuracy[grow].append(reached)
    ratios = [grown / fixed for fixed, grown in zip(seconds[False], seconds[True], strict=True)]
    differences = [grown - fixed for fixed, grown in zip(accuracy[False], accuracy[True], strict=True)]
    return {
        "seeds": seeds,
        "epochs": epochs,
        "fixed_seconds": round(statistics.median(seconds[False]), 2),
        "grown_seconds": round(statistics.median(seconds[True]), 2),
        "time_ratio": round(statistics.median(ratios), 4),
        "pixel_ratio": round(pixels(epochs, schedule), 4),
        "fixed_accuracy": round(statistics.mean(accuracy[False]), 4),
        "grown_accuracy": round(statistics.mean(accuracy[True]), 4),
        "accuracy_difference": round(statistics.mean(differences), 4),
        "difference_error": round(statistics.stdev(differences) / seeds**0.5, 4) if seeds > 1 else float("nan"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--no-speed", action="store_true", help="measure the savings only")
    parser.add_argument("--schedule", type=json.loads, default=SCHEDULE, help="sizes of the growing run, by point")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    result: dict[str, object] = {"benchmark": "progressive_resizing", "torch": torch.__version__}
    if not options.no_speed:
        with tempfile.TemporaryDirectory() as folder:
            write_jpegs(Path(folder), BATCH * BATCHES, 90)
            found = speeds(Path(folder), options.rounds)
        result["images_per_s"] = found
        print("\nimages a CPU-second")
        for what, by_size in found.items():
            print(f"{what:<10}" + "".join(f"{name:>11}: {rate:>9,.0f}" for name, rate in by_size.items()))
    if options.seeds:
        saved = savings(options.seeds, options.epochs, options.schedule)
        result["digits"] = saved
        grown = ", ".join(map(str, options.schedule.values())) + " pixels"
        print(f"\n{saved['epochs']} epochs of digits, {saved['seeds']} seeds")
        print(f"{'images':<18}{'CPU s':>8}{'val_acc1':>10}")
        print(f"{'16 pixels':<18}{saved['fixed_seconds']:>8.1f}{saved['fixed_accuracy']:>10.2%}")
        print(f"{grown:<18}{saved['grown_seconds']:>8.1f}{saved['grown_accuracy']:>10.2%}")
        print(
            f"time x {saved['time_ratio']:.2f} (pixels x {saved['pixel_ratio']:.2f}),"
            f" accuracy {saved['accuracy_difference']:+.2%} +- {saved['difference_error']:.2%} (standard error)"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
