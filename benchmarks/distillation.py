"""How much of a teacher's accuracy does a student with 40% fewer parameters keep, beside the same student alone?

    python benchmarks/distillation.py [--seeds 5] [--text-seeds 2]

* images: the teacher is the quick start's ViT, the student has half of its blocks. 97% of the teacher's accuracy is
  DistilBERT's figure (Sanh et al. 2019, arXiv 1910.01108).
* text: the teacher is the text quick start's Llama with 6 blocks, the student has half of them. The gain is that over a
  random guess: in cross-entropy, `ln V - loss`, which is stricter than in perplexity, `V - exp(loss)`.

Per seed (of weights, of the data's order, and of the images' split) one teacher is trained, and then students with the
same number of steps: `alone`; `every 2`, which starts from every second block of the teacher, without distillation;
`distilled`, from random weights; `distilled, every 2`, as DistilBERT. Figures are those of the last validation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from measuring.catalogue import parse_options
from measuring.record import Record, Table

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.97
#: Vocabulary of the text quick start.
VOCABULARY = 4096
#: Name of the students, with the options of Distill; None without it. Without distillation, the distance has a factor
#: so small that it changes nothing.
STUDENTS: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "every 2": {"init_from": "every 2", "weight": 1e-12, "ce_weight": 1.0},
    "distilled": {},
    "distilled, every 2": {"init_from": "every 2"},
}
#: Options of Distill for images and for text.
IMAGES = {"temperature": 4.0, "ce_weight": 0.5}
TEXT = {"temperature": 2.0, "ce_weight": 0.5}


def images(blocks: int, epochs: int) -> dict[str, Any]:
    """Returns the quick start's config with this number of blocks."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["trainer"]["max_epochs"] = epochs
    config["model"]["init_args"]["model_args"]["depth"] = blocks
    return config


def text(blocks: int, steps: int) -> dict[str, Any]:
    """Returns the text quick start's config with this number of blocks."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "llm" / "quickstart.yaml").read_text())
    config["trainer"] |= {"max_steps": steps, "val_check_interval": steps, "limit_val_batches": 32}
    init = config["model"]["init_args"]
    init["config"]["num_hidden_layers"] = blocks
    init["warmup_steps"] = min(init["warmup_steps"], steps)
    for name in ("prompts", "sampling"):
        init.pop(name)
    return config


def run(name: str, config: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Trains once; returns the run's summary, with its folder."""
    config["run"] = {"dir": str(folder / str(seed)), "name": name.replace(", ", "_").replace(" ", "_")}
    config["seed_everything"] = seed
    if config["data"]["class_path"] == "DigitsData":
        config["data"]["init_args"]["seed"] = seed
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config['run']['name']}.yaml"
    path.write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "dlo_framework", "fit", "--config", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    place = Path(config["run"]["dir"]) / config["run"]["name"] / "version_0"
    return {**json.loads((place / "summary.json").read_text()), "folder": str(place)}


def distilled(config: dict[str, Any], teacher: str, options: dict[str, Any]) -> dict[str, Any]:
    """Adds Distill to a config."""
    callbacks = config["trainer"].setdefault("callbacks", [])
    callbacks.append({"class_path": "Distill", "init_args": {"teacher": {"checkpoint": f"{teacher}/last"}, **options}})
    return config


def contend(kind: str, seeds: int, size: int, folder: Path, students: list[str]) -> dict[str, list[float]]:
    """Trains teacher and students for each seed; returns accuracies, or cross-entropies."""
    make, metric, own = (images, "val_acc1", IMAGES) if kind == "images" else (text, "val_loss", TEXT)
    found: dict[str, list[float]] = {"teacher": [], **{name: [] for name in students}}
    for seed in range(1, seeds + 1):
        teacher = run("teacher", make(6, size), seed, folder / kind)
        found["teacher"].append(teacher["metrics"][metric])
        for name in students:
            config, options = make(3, size), STUDENTS[name]
            if options is not None:
                config = distilled(config, teacher["folder"], {**own, **options})
            found[name].append(run(name, config, seed, folder / kind)["metrics"][metric])
        print(
            f"{kind}, seed {seed}: " + ", ".join(f"{who} {values[-1]:.4f}" for who, values in found.items()), flush=True
        )
    return found


def parameters(make: Any, blocks: int) -> int:
    """Returns the number of parameters of a config's model."""
    import torch

    from dlo_tasks.imagenet.classifier import ImageClassifier
    from dlo_tasks.llm.causal_lm import CausalLM

    init = make(blocks, 1)["model"]["init_args"]
    if make is images:
        task: Any = ImageClassifier(**{**init, "num_classes": 10, "image_size": 16})
    else:
        task = CausalLM(**{**init, "config": {**init["config"], "vocab_size": VOCABULARY}})
    with torch.device("meta"):
        model = task.on_meta().model
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--text-seeds", type=int, default=2)
    parser.add_argument("--text-steps", type=int, default=420)
    parser.add_argument("--text-students", nargs="+", default=list(STUDENTS), choices=list(STUDENTS))
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.seeds:
            record.add(table_of_images(contend("images", options.seeds, options.epochs, folder, list(STUDENTS))))
        if options.text_seeds:
            record.add(
                table_of_text(contend("text", options.text_seeds, options.text_steps, folder, options.text_students))
            )
    record.finish()


def fewer(make: Any) -> str:
    """Returns a note on the sizes of teacher and student."""
    big, small = parameters(make, 6), parameters(make, 3)
    return f"{big:,} parameters of the teacher, {small:,} of the student: {1 - small / big:.1%} fewer"


def table_of_images(found: dict[str, list[float]]) -> Table:
    """Returns the shares of the teacher's accuracy."""
    table = Table("accuracy on the digits", "the teacher's accuracy", "share of accuracy", better="higher")
    for who, values in found.items():
        shares = [value / base for value, base in zip(values, found["teacher"], strict=True)]
        ours = who.startswith("distilled")
        table.add(who, shares, bar=BAR if ours else None, ours=ours, mean_accuracy=sum(values) / len(values))
    table.notes.append(fewer(images))
    return table


def table_of_text(found: dict[str, list[float]]) -> Table:
    """Returns the shares of the teacher's gain over a random guess, in cross-entropy."""
    table = Table("gain on the text quick start", "the teacher's gain", "share of ln V - loss", better="higher")
    guess = math.log(VOCABULARY)
    for who, values in found.items():
        shares = [(guess - value) / (guess - base) for value, base in zip(values, found["teacher"], strict=True)]
        in_perplexity = [
            (VOCABULARY - math.exp(value)) / (VOCABULARY - math.exp(base))
            for value, base in zip(values, found["teacher"], strict=True)
        ]
        ours = who.startswith("distilled")
        columns = {
            "mean_perplexity": sum(map(math.exp, values)) / len(values),
            "in_perplexity": sum(in_perplexity) / len(in_perplexity),
        }
        table.add(who, shares, bar=BAR if ours else None, ours=ours, **columns)
    table.notes.append(fewer(text))
    return table


if __name__ == "__main__":
    main()
