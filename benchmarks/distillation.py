"""How much of a teacher's accuracy does a student with 40% fewer parameters keep, beside the same student alone?

    python benchmarks/distillation.py [--seeds 5] [--text-seeds 2]

* images: the teacher is the quick start's ViT, the student has half of its blocks. 97% of the teacher's accuracy is
  DistilBERT's figure (Sanh et al. 2019, arXiv 1910.01108).
* text: the teacher is the text quick start's Llama with 6 blocks, the student has half of them. The gain is that over a
  random guess: in cross-entropy, `ln V - loss`, which is stricter than in perplexity, `V - exp(loss)`.

* memory: distillation over a vocabulary in chunks, beside the logits of all tokens at once.

Per seed (of weights, of the data's order, and of the images' split) one teacher is trained, and then students with the
same number of steps: `alone`; `every 2`, which starts from every second block of the teacher, without distillation;
`distilled`, from random weights; `distilled, every 2`, as DistilBERT. Figures are those of the last validation.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import Trainer, seed_everything
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from torch import nn

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.frozen_model import FrozenModel
from dlo_plugins.callbacks.distill import Distill
from dlo_plugins.callbacks.one_cycle import OneCycle
from dlo_plugins.distillation.logit_losses import LogitDistance
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.llm.causal_lm import CausalLM
from dlo_tasks.llm.text_data import TextData
from dlo_tasks.llm.vocabulary_distillation import summed_distillation
from dlo_tasks.llm.vocabulary_loss import VocabularyHead

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
METRICS: dict[type, str] = {ImageClassifier: "val_acc1", CausalLM: "val_loss"}


def images(blocks: int, seed: int) -> tuple[Any, Any, list[Any]]:
    """Returns the quick start's task with this number of blocks, its data and its callbacks."""
    init = configured("quickstart.yaml")["model"]["init_args"]
    init["model_args"]["depth"] = blocks
    task = ImageClassifier(**init, log_images=0)
    return task, DigitsData(image_size=16, batch_size=64, seed=seed), [OneCycle(max_lr=1.5e-3)]


def text(blocks: int, seed: int) -> tuple[Any, Any, list[Any]]:
    """Returns the text quick start's task with this number of blocks, its data and its callbacks."""
    init = configured("llm/quickstart.yaml")["model"]["init_args"]
    init["config"] |= {"num_hidden_layers": blocks, "vocab_size": VOCABULARY}  # The teacher's task sees no data.
    for name in ("prompts", "sampling"):
        init.pop(name)
    return CausalLM(**init), TextData(seq_len=256, batch_size=4), []


def configured(name: str) -> dict[str, Any]:
    """Returns a recipe of configs/."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "configs" / name).read_text())
    return found


def run(
    made: tuple[Any, Any, list[Any]], limits: dict[str, Any], seed: int, folder: Path, distill: Any = None
) -> float:
    """Trains once, saves the last weights in a folder, and returns the metric of the last validation."""
    task, data, callbacks = made
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
        callbacks=[*callbacks, *([distill] if distill is not None else [])],
        **limits,
    )
    use_canonical_checkpoints(trainer)
    trainer.fit(task, datamodule=data)
    trainer.save_checkpoint(folder / "last.ckpt")
    return float(trainer.callback_metrics[METRICS[type(task)]])


def contend(
    kind: str, seeds: range, limits: dict[str, Any], folder: Path, students: list[str]
) -> dict[str, list[float]]:
    """Trains teacher and students for each seed; returns accuracies, or cross-entropies."""
    make, own = (images, IMAGES) if kind == "images" else (text, TEXT)
    found: dict[str, list[float]] = {"teacher": [], **{name: [] for name in students}}
    for seed in seeds:
        place = folder / f"{kind}_{seed}"
        found["teacher"].append(run(make(6, seed), limits, seed, place))
        for name in students:
            options, distill = STUDENTS[name], None
            if options is not None:
                teacher = FrozenModel(str(place / "last.ckpt"), task=make(6, seed)[0])
                distill = Distill(teacher, **{**own, **options})
            found[name].append(run(make(3, seed), limits, seed, place / name.replace(", ", "_"), distill))
            print(f"{kind}, seed {seed}: {name} {found[name][-1]:.4f}, teacher {found['teacher'][-1]:.4f}", flush=True)
    return found


def parameters(make: Any, blocks: int) -> int:
    """Returns the number of parameters of a model."""
    task, data, _ = make(blocks, 1)
    if make is images:
        task.check(data)
    else:
        task.config.vocab_size = VOCABULARY
    return sum(parameter.numel() for parameter in task.on_meta().model.parameters())


#: Sizes of the measurement of memory: tokens, widths of student and teacher, vocabulary.
MEMORY = {"tokens": 4096, "width": 256, "teacher_width": 512, "vocabulary": 32_768}
FORMS = ("nothing", "all logits", "chunks")


def peak_megabytes(form: str, sizes: dict[str, int]) -> float:
    """Returns the peak memory of a process that distils once, forward and backward, in MB."""
    words = [sys.executable, __file__, "--form", form, *(str(size) for size in sizes.values())]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def distil_once(form: str, tokens: int, width: int, teacher_width: int, vocabulary: int) -> None:
    """Distils over a vocabulary in one of the forms, and prints the process's peak memory in MB."""
    torch.manual_seed(0)
    student, teacher = (nn.Linear(size, vocabulary, bias=False) for size in (width, teacher_width))
    hidden, theirs = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, teacher_width)
    targets = torch.zeros(tokens, dtype=torch.long)
    if form == "chunks":
        heads = VocabularyHead(student), hidden, VocabularyHead(teacher), theirs
        summed_distillation(*heads, targets, LogitDistance("kl", 2.0))[0].backward()
    elif form == "all logits":
        with torch.no_grad():
            wanted = torch.log_softmax(teacher(theirs) / 2, 1)
        found = torch.log_softmax(student(hidden) / 2, 1)
        (4 * F.kl_div(found, wanted, log_target=True, reduction="sum")).backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def table_of_memory(rounds: int) -> Table:
    """Returns the peak memory of distillation over a vocabulary, above that of a process that does nothing."""
    table = Table("peak memory over a vocabulary", "all logits at once", "MB of the process")
    peaks = {form: [peak_megabytes(form, MEMORY) for _ in range(rounds)] for form in FORMS}
    above = {
        form: [peak - base for peak, base in zip(peaks[form], peaks["nothing"], strict=True)] for form in FORMS[1:]
    }
    for form, values in above.items():
        shares = [value / base for value, base in zip(values, above["all logits"], strict=True)]
        ours = form == "chunks"
        table.add(f"dlo, {form}" if ours else form, shares, bar=0.5 if ours else None, ours=ours, MB=values[0])
    table.notes.append(", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in MEMORY.items()) + ", float32")
    return table


def main() -> None:
    if sys.argv[1:2] == ["--form"]:
        distil_once(sys.argv[2], *(int(size) for size in sys.argv[3:]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of memory; 0 leaves them out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--text-seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=1, help="so that each seed can be a run of its own")
    parser.add_argument("--text-steps", type=int, default=420)
    parser.add_argument("--text-students", nargs="+", default=list(STUDENTS), choices=list(STUDENTS))
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)

    def seeds(count: int) -> range:
        return range(options.first_seed, options.first_seed + count)

    record = Record.of(__file__, __doc__, options)
    if options.rounds:
        record.add(table_of_memory(options.rounds))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.seeds:
            limits: dict[str, Any] = {"max_epochs": options.epochs, "check_val_every_n_epoch": options.epochs}
            record.add(table_of_images(contend("images", seeds(options.seeds), limits, folder, list(STUDENTS))))
        if options.text_seeds:
            limits = {"max_steps": options.text_steps, "val_check_interval": options.text_steps}
            limits |= {"limit_val_batches": 32, "gradient_clip_val": 1.0}
            record.add(table_of_text(contend("text", seeds(options.text_seeds), limits, folder, options.text_students)))
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
