"""What the schemes of Quantise cost in accuracy, and bring in bytes and CPU latency, and whether training with rounding
helps.

Two ViTs learn the digits by the quick start's recipe, from several seeds: ``quick start``, of width 96, and ``wide``,
of width 128 with a class token. Of each seed:

* The float model, converted after training by each scheme. Its own figures are the unit.
* The same recipe with ``when: aware, start: 50%``, converted by ``int4_weights``, in groups of ``--group-size``; also
  with bits that fall from 8 to 4, in all layers alike and by the layers' curvature. The unit is the same seed's model
  that is converted after training.

Accuracies and losses are of the converted model, with torchao's kernels, on the held-out fifth (359 images: one image
is 0.28%). Latencies are medians of rounds in which the contestants take turns, of one batch on the CPU with one thread;
the float model is measured twice, as the A/A control. With ``--compiled``, all are measured compiled by Inductor too.

Run: ``python benchmarks/quantisation.py [--seeds 5] [--epochs 60] [--compiled]``
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS, all_ratios, take_turns

from dlo_framework.checkpoint import SafeCheckpointIO
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.testing.training import silence_lightning
from dlo_plugins.callbacks.one_cycle import OneCycle
from dlo_plugins.callbacks.quantise import Quantise
from dlo_plugins.quantisation.conversion import convert
from dlo_plugins.quantisation.post_training import (
    EvaluationData,
    PostTraining,
    fresh_copy,
    named_layers,
)
from dlo_plugins.quantisation.quantisation_options import QuantisationOptions
from dlo_plugins.quantisation.report import QuantisationReport
from dlo_plugins.quantisation.schemes import SCHEMES
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData

MODELS: dict[str, dict[str, Any]] = {
    "quick start": {"embed_dim": 96, "depth": 6, "num_heads": 3, "global_pool": "avg", "class_token": False},
    "wide": {"embed_dim": 128, "depth": 4, "num_heads": 4},
    "narrow": {"embed_dim": 32, "depth": 2, "num_heads": 2},
}
POST = ("int8", "int8_static", "int8_weights", "int4_weights")
AWARE: dict[str, dict[str, Any]] = {
    "aware": {},
    "aware, from 8 bits": {"start_bits": 8},
    "aware, from 8 bits, mixed": {"start_bits": 8, "mixed_bits": True},
}
CPU = torch.device("cpu")


def classifier(model: str) -> ImageClassifier:
    """The quick start's task, with another model."""
    return ImageClassifier(
        "vit_tiny_patch16_224",
        model_args={"patch_size": 4, **MODELS[model]},
        optimizer="adamw",
        weight_decay=0.3,
        label_smoothing=0.1,
        schedule="constant",
        log_images=0,
    )


def trained(model: str, seed: int, epochs: int, folder: Path, *callbacks: Any) -> tuple[ImageClassifier, DigitsData]:
    """Trains by the quick start's recipe."""
    seed_everything(seed, workers=True, verbose=False)
    task, data = classifier(model), DigitsData(image_size=16, batch_size=64)
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"),
        False,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        limit_val_batches=1.0 if callbacks else 0,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=epochs,
        callbacks=[OneCycle(max_lr=1.5e-3), *callbacks],
        plugins=[SafeCheckpointIO()],
        default_root_dir=folder,
        **quiet,
    )
    use_canonical_checkpoints(trainer)
    trainer.fit(task, datamodule=data)
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return task, data


def options_of(scheme: str, group_size: int) -> QuantisationOptions:
    """Options of a conversion without a measurement of latency."""
    return QuantisationOptions(SCHEMES[scheme], group_size, measures_latency=False)


def reports_of_seed(model: str, seed: int, options: argparse.Namespace) -> dict[str, QuantisationReport]:
    """Trains with and without rounding, and converts by each scheme."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        task, data = trained(model, seed, options.epochs, folder)
        for scheme in POST:
            conversion = PostTraining(options_of(scheme, options.group_size), EvaluationData(data), CPU)
            found[scheme] = conversion.run(fresh_copy(task), folder / "weights.ckpt", "post", folder)
    for name, arguments in AWARE.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            callback = Quantise(
                "int4_weights", when="aware", start="50%", group_size=options.group_size, report=False, **arguments
            )
            task, data = trained(model, seed, options.epochs, folder, callback)
            conversion = PostTraining(options_of("int4_weights", options.group_size), EvaluationData(data), CPU)
            found[name] = conversion.run(fresh_copy(task), folder / "weights.ckpt", "aware", folder)
    return found


def compare(record: Record, model: str, options: argparse.Namespace) -> None:
    """Adds the tables of accuracy, of training with rounding, and of bytes."""
    reports = [
        reports_of_seed(model, seed, options) for seed in range(options.first_seed, options.first_seed + options.seeds)
    ]
    accuracy = Table(f"{model}: accuracy after conversion", "the float model's", "none", better="higher")
    for scheme in POST:
        rows = [found[scheme] for found in reports]
        accuracy.add(
            scheme,
            [one.after["val_acc1"] / one.before["val_acc1"] for one in rows],
            bar=0.995 if scheme.startswith("int8") else None,
            ours=True,
            accuracy=statistics.mean(one.after["val_acc1"] for one in rows),
            float_accuracy=statistics.mean(one.before["val_acc1"] for one in rows),
            loss=statistics.mean(one.after["val_loss"] for one in rows),
            float_loss=statistics.mean(one.before["val_loss"] for one in rows),
        )
    record.add(accuracy)
    aware = Table(f"{model}: loss of int4 with rounding in training", "int4 after training", "none")
    for name in AWARE:
        pairs = [(found[name], found["int4_weights"]) for found in reports]
        aware.add(
            name,
            [mine.after["val_loss"] / theirs.after["val_loss"] for mine, theirs in pairs],
            bar=1.0,
            ours=True,
            accuracy=statistics.mean(mine.after["val_acc1"] for mine, _ in pairs),
            post_accuracy=statistics.mean(theirs.after["val_acc1"] for _, theirs in pairs),
            loss_better_in=sum(mine.after["val_loss"] < theirs.after["val_loss"] for mine, theirs in pairs),
            accuracy_better_in=sum(mine.after["val_acc1"] > theirs.after["val_acc1"] for mine, theirs in pairs),
            accuracy_worse_in=sum(mine.after["val_acc1"] < theirs.after["val_acc1"] for mine, theirs in pairs),
        )
    record.add(aware)
    size = Table(f"{model}: bytes of the model", "the float model's, inverted", "none", better="higher")
    for scheme in POST:
        one = reports[0][scheme]
        ratios = [one.bytes_before[number] / one.bytes_after[number] for number in (0, 1)]
        columns = {"layers'_weights": ratios[1], "kB": one.bytes_after[0] / 1000}
        size.add(scheme, [ratios[0]], bar=3.5, ours=True, **columns)
    record.add(size)


def measure(record: Record, model: str, batch_size: int, options: argparse.Namespace, compiled: bool) -> None:
    """Adds a table of latencies of one batch."""
    seed_everything(0, verbose=False)
    task = classifier(model)
    task.num_classes, task.image_size = 10, 16
    task.configure_model()
    images = torch.randn(batch_size, 3, 16, 16)
    models = {"float32": task.model.eval()}
    for scheme in ("int8", "int8_weights", "int4_weights"):
        twin = copy.deepcopy(task)
        convert(
            twin.model,
            named_layers(twin, options_of(scheme, options.group_size)),
            SCHEMES[scheme],
            options.group_size,
            CPU,
        )
        models[scheme] = twin.model.eval()
    if compiled:
        models = {name: torch.compile(each) for name, each in models.items()}

    def forward(name: str) -> float:
        with torch.inference_mode():
            return PROCESS.seconds(lambda: models[name](images), calls=options.calls)

    runs = {name: (lambda name=name: forward(name)) for name in models}
    runs["float32 again"] = runs["float32"]
    seconds = take_turns(runs, options.rounds)
    kind = "compiled" if compiled else "eager"
    table = Table(f"{model}: CPU latency, batch of {batch_size}, {kind}", "float32", PROCESS)
    for name, values in all_ratios(seconds, "float32").items():
        milliseconds = statistics.median(seconds[name]) * 1000
        is_ours = name in SCHEMES
        table.add(name, values, ours=is_ours, control=name == "float32 again", ms=milliseconds)
    record.add(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=11, help="of the latencies; 0 leaves them out")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["quick start", "wide"])
    parser.add_argument("--compiled", action="store_true", help="also measure compiled models")
    options = parse_options(parser, __file__)
    silence_lightning()
    torch.set_num_threads(1)
    record = Record.of(__file__, __doc__, options)
    for model in options.models:
        compare(record, model, options)
        for batch_size in (1, 32) if options.rounds else ():
            measure(record, model, batch_size, options, compiled=False)
    if options.compiled:
        measure(record, options.models[0], 32, options, compiled=True)
    record.finish()


if __name__ == "__main__":
    main()
