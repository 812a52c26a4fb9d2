"""How many images a second at each size, and what growing the images saves at equal accuracy.

    python benchmarks/progressive_resizing.py [--rounds 7] [--seeds 5] [--epochs 60] [--no-speed] [--schedule JSON]

**Speed**, one thread, CPU time of the process: images a second that ImageFolderData makes of JPEGs of 500 x 400
(decode, crop, flip, normalise), that DigitsData makes, and that a training step of a small ViT (patch 16, width 192,
depth 4) takes, by size, over those at the largest. The model is built for that one, so that its position embedding is
interpolated at all others. `224 again` is the A/A control.

**Savings**, the digits recipe of configs/digits: the same run with the images at 16 pixels throughout, and with
ProgressiveResizing, for several seeds of weights, order and split. CPU time of training, validation left out, and the
validation accuracy after the last epoch; differences are taken within a seed. The roofline of the saving is that of the
pixels: the mean area of an image over that of the last size, which is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from data_path import write_jpegs
from lightning.pytorch import Callback, Trainer, seed_everything
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS, all_ratios, ratios, take_turns
from overhead import silence

from dlo_framework.models.model_sizes import accept_any_size
from dlo_plugins.images.progressive_resizing import ProgressiveResizing
from dlo_plugins.schedules.lr_curves import OneCycle
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.imagenet.folder import ImageFolderData

SIZES = (128, 160, 192, 224)
DIGITS = (8, 12, 16)
BATCH, BATCHES = 16, 2  # of a measurement
SCHEDULE = '{"0": 12, "60%": 16}'  # of configs/digits/progressive_resizing.yaml

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


def speed_tables(root: Path, rounds: int) -> list[Table]:
    """Measures images per CPU-second by what makes or takes them, and by size."""
    runs: dict[tuple[str, str], Callable[[], int]] = {}
    for name in [*map(str, SIZES), f"{SIZES[-1]} again"]:
        size = int(name.split()[0])
        jpegs = ImageFolderData(str(root), image_size=size, batch_size=BATCH, num_workers=0)
        runs["JPEGs, decoded and cropped", name] = draining(jpegs, size)
        runs["a small ViT's training step", name] = stepping(size)
    for size in DIGITS:
        runs["digits", str(size)] = draining(DigitsData(image_size=16), size)

    def rate(run: Callable[[], int]) -> float:
        start = PROCESS.now()
        count = run()
        return count / (PROCESS.now() - start)

    keys = {f"{what}: {size}": (what, size) for what, size in runs}
    found = take_turns({key: (lambda run=runs[at]: rate(run)) for key, at in keys.items()}, rounds)
    tables = []
    for what in dict.fromkeys(what for what, _ in runs):
        rates = {at[1]: found[key] for key, at in keys.items() if at[0] == what}
        base = str(DIGITS[-1] if what == "digits" else SIZES[-1])
        table = Table(what, f"the images a CPU-second at {base} pixels", PROCESS, better="higher")
        for name, values in all_ratios(rates, base).items():
            table.add(name, values, control="again" in name, images_a_CPU_second=statistics.median(rates[name]))
        tables.append(table)
    return tables


# --- savings -----------------------------------------------------------------------------------------------


class Stopwatch(Callback):
    """Adds up the CPU time of training, without validation."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        self._began = PROCESS.now()

    def on_validation_start(self, trainer: Trainer, pl_module: object) -> None:
        self.seconds += PROCESS.now() - self._began

    def on_validation_end(self, trainer: Trainer, pl_module: object) -> None:
        self._began = PROCESS.now()

    def on_train_end(self, trainer: Trainer, pl_module: object) -> None:
        self.seconds += PROCESS.now() - self._began


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


def savings_table(seeds: int, epochs: int, schedule: Schedule) -> Table:
    """Trains both ways for each seed, next to each other."""
    train(0, 1, schedule)  # warm up
    seeded: dict[str, int] = {}
    found = take_turns(
        {"fixed": lambda: train(seeded["at"], epochs, None), "grown": lambda: train(seeded["at"], epochs, schedule)},
        seeds,
        warm_up=0,
        before_round=lambda number: seeded.update(at=number),
    )
    seconds = {name: [took for took, _ in runs] for name, runs in found.items()}
    accuracy = {name: [reached for _, reached in runs] for name, runs in found.items()}
    differences = [grown - fixed for fixed, grown in zip(accuracy["fixed"], accuracy["grown"], strict=True)]
    size = str(list(schedule.values())[-1])
    title = f"{epochs} epochs of digits, {', '.join(map(str, schedule.values()))} pixels"
    table = Table(title, f"training at {size} pixels throughout", PROCESS)
    for name, label in (("fixed", f"{size} pixels"), ("grown", "dlo, ProgressiveResizing")):
        table.add(
            label,
            ratios(seconds[name], seconds["fixed"]),
            ours=name == "grown",
            s=statistics.median(seconds[name]),
            pixels=pixels(epochs, schedule) if name == "grown" else 1.0,
            accuracy=f"{statistics.mean(accuracy[name]):.2%}",
        )
    told = f"Accuracy differs by {statistics.mean(differences):+.2%}"
    if seeds > 1:
        told += f", standard error {statistics.stdev(differences) / seeds**0.5:.2%}"
    table.notes.append(f"{told}; {seeds} seed{'s' if seeds > 1 else ''}.")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--no-speed", action="store_true", help="measure the savings only")
    parser.add_argument("--schedule", type=json.loads, default=SCHEDULE, help="sizes of the growing run, by point")
    options = parse_options(parser, __file__)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    record = Record.of(__file__, __doc__, options)
    if not options.no_speed:
        with tempfile.TemporaryDirectory() as folder:
            write_jpegs(Path(folder), BATCH * BATCHES, 90)
            for table in speed_tables(Path(folder), options.rounds):
                record.add(table)
    if options.seeds:
        record.add(savings_table(options.seeds, options.epochs, options.schedule))
    record.finish()


if __name__ == "__main__":
    main()
