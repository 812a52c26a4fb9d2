"""How many models that nobody here wrote work: causal LMs of transformers, and a model of each timm module.

    python benchmarks/breadth.py [--only bart beit_base_patch16_224] [--kinds text image] [--axes tp resizing]
    python benchmarks/breadth.py --deepspeed FOLDER [FOLDER ...]

Each model is a tiny one with random weights. `tp`, `pp` and `cp` are the check of two ranks before a run, which
rehearses a step on fake tensors. Where `tp` passes, two ranks that are threads of this process compute the forward and
backward of the cut model in double precision, and the largest difference from the full one is kept: of outputs and
gradients, relative to the largest entry. Code that computes norms or softmax in single precision inside is off by 1e-7
or so there. `attention` is whether two ranks of `tp` divide the heads of an attention, or why not. Where `cp` passes,
two processes with gloo compare the same for a sequence that they share, with packed documents where the model keeps
them apart. `packing` is whether a batch may hold several documents in a row: by the model's own masks (`ok`), or by
changes to its modules that dlo infers (`inferred`). `resizing` is whether a model of images computes, and trains every
parameter, at the next size that its multiple allows, with the same parameters and the same outputs at its own size.

`--deepspeed` counts the DeepSpeed JSONs in folders instead, such as clones of repositories, each content once: those
that `dlo deepspeed-config` translates, those that DeepSpeed's own class of configurations takes (without their batch
sizes), and both. Files that are not JSON, such as templates with placeholders, are counted apart.

It prints the counts, and for each kind a line of JSON with the reason of each refusal.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measuring.record import Record, Table

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.models.model_sizes import accept_any_size, find_objection, size_multiple
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_plugins.deepspeed.json_file import check_whole
from dlo_plugins.deepspeed.translation import to_yaml
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.tensor.block_proof import run_on_threads
from dlo_plugins.parallel.tensor.inferred_rules import has_rules
from dlo_plugins.parallel.tensor.installation import install_plan
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.parallel.tensor.tp_planner import make_tp_plan
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import TYPES, tiny
from support.image_models import IMAGE_MODELS, options
from support.shared_sequences import compare

LENGTH, ROWS = 16, 2
AXES: dict[str, dict[str, int]] = {
    "tp": {"tp": 2, "dp_shard": 1},
    "pp": {"pp": 2, "dp_shard": 1, "micro_batches": 2},
    "cp": {"cp": 2, "dp_shard": 1},
}
KINDS = [*AXES, "attention", "packing", "resizing"]
#: What is asked of one kind of models alone.
ONLY = {"packing": "text", "resizing": "image"}
OFF = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
#: Largest difference that counts as the same result, where code computes in double precision throughout.
SAME = 1e-7


class Shapes:
    """What a datamodule tells of its batches before it has read any."""

    seq_len, batch_size, num_classes = LENGTH, ROWS, 3


def make(name: str, freezes: bool = False) -> Task:
    """Returns a task of a type of transformers, or of a model of timm.

    Args:
        name: Name of the type or model.
        freezes: Whether parameters that no text reaches are frozen, as the check's error advises.
    """
    if name in TYPES:
        return CausalLM(config=tiny(name, dropout=False), freeze="auto" if freezes else None)
    return ImageClassifier(name, num_classes=3, **options(name))


def batch_of(task: Any) -> Any:
    """Returns a batch for a task in double precision."""
    draw = torch.Generator().manual_seed(1)
    if isinstance(task, ImageClassifier):
        size = task.image_size
        return torch.randn(ROWS, 3, size, size, generator=draw, dtype=torch.float64), torch.zeros(ROWS).long()
    ids = torch.randint(3, 60, (ROWS, LENGTH), generator=draw)
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH).expand(ROWS, LENGTH)}


def checked(name: str, axis: str, freezes: bool = False) -> tuple[str, bool]:
    """Returns why the check of an axis refuses a model, "" if it passes; and whether the tensor rules are inferred."""
    task, strategy = make(name, freezes), MeshStrategy(**AXES[axis])
    Trainer(accelerator="cpu", devices=2, strategy=strategy, **OFF)
    try:
        strategy.check_model(task, Shapes())
    except DloError as error:
        return checked(name, axis, freezes=True) if "freeze auto" in str(error) else (str(error), False)
    return "", axis == "tp" and not has_rules(task.on_meta().parallel_plan())


def gradients_of(task: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Returns a task's outputs, and its parameters' gradients of a fixed function of them."""
    args, kwargs = task.inputs(batch)
    found = task.forward(*args, **kwargs)
    output = found[0] if isinstance(found, tuple) else found
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    (output * weights).sum().backward()
    return output.detach(), {name: parameter.grad for name, parameter in task.model.named_parameters()}


def largest_difference(name: str) -> float:
    """Returns the largest relative difference of two ranks of tp from one process."""
    torch.manual_seed(0)
    task: Any = make(name)
    task.configure_model()
    task = task.double().eval()
    batch = batch_of(task)
    try:
        expected, grads = gradients_of(copy.deepcopy(task), batch)
    except RuntimeError:  # Products of experts have no double precision.
        task, batch = task.float(), batch_of(task)
        expected, grads = gradients_of(copy.deepcopy(task), batch)
    found = make_tp_plan(task.model, TensorParallel().complete_plan(task, task.parallel_plan(), 2, Shapes()), 2)

    def run(communicator: Communicator) -> tuple[Tensor, dict[str, Tensor | None]]:
        own = copy.deepcopy(task)
        install_plan(own.model, found, communicator)
        return gradients_of(own, batch)

    ranks = run_on_threads(2, run)
    worst = max(difference(output, expected, 0.0) for output, _ in ranks)
    least = 1e-2 * max(float(grad.abs().max()) for grad in grads.values() if grad is not None)
    for key, full in grads.items():
        if full is None:
            continue
        parts = [own[key] if own[key] is not None else torch.zeros(()) for _, own in ranks]
        if key in found.divisions:
            slices = [found.divisions[key].slice_for(2, rank).slice_tensor(full) for rank in range(2)]
            worst = max(worst, *(difference(part, own, least) for part, own in zip(parts, slices, strict=True)))
        else:
            worst = max(worst, difference(sum(parts) if key in found.partial else parts[0], full, least))
    return worst


def difference(found: Any, expected: Tensor, least: float) -> float:
    """Returns the largest difference of two tensors, relative to the largest entry or to `least`."""
    scale = max(float(expected.abs().max()), least, 1e-30)
    return float((found - expected).abs().max()) / scale


def divided_attention(name: str) -> str:
    """Returns why two ranks divide no attention's heads, "ok" or "inferred" if they do."""
    task: Any = make(name).on_meta()
    plan, applier = task.parallel_plan(), TensorParallel()
    found = make_tp_plan(task.model, applier.complete_plan(task, plan, 2, Shapes()), 2)
    if any(region.heads for region in found.regions.values()):
        return "ok" if has_rules(plan) else "inferred"
    return "; ".join(line.strip() for line in applier.describe_inferred(task.model)[1:]) or "no attention"


def resized(name: str) -> str:
    """Returns why a model of images cannot change their size in training, "ok" if it can."""
    torch.manual_seed(0)
    task: Any = make(name)
    task.configure_model()
    model, size = task.model, task.image_size
    own = torch.randn(ROWS, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in model.parameters():  # Some tables begin as zeros.
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
        expected, before = model.eval()(own), dict(model.named_parameters())
    accept_any_size(model)
    step = size_multiple(model) or 32
    other = (size // step + 1) * step
    why = find_objection(model, (other, other))
    if why is not None:
        return f"{size} -> {other}: {why}"
    with torch.no_grad():
        if not torch.equal(model(own), expected):
            return f"its outputs at {size} change"
    output = model.train()(torch.randn(ROWS, 3, other, other))
    sum(part.square().sum() for part in (output if isinstance(output, tuple) else (output,))).backward()
    now = dict(model.named_parameters())
    if now.keys() != before.keys() or any(now[key] is not parameter for key, parameter in before.items()):
        return "its parameters change"
    still = [key for key, parameter in now.items() if parameter.grad is None or not parameter.grad.isfinite().all()]
    return f"no gradient of {', '.join(still[:3])} at {other}" if still else "ok"


def measure(name: str, axes: list[str]) -> dict[str, Any]:
    """Returns what is found of a model, by axis: `ok`, `inferred` or the reason of a refusal; and tp's difference."""
    found: dict[str, Any] = {}
    for axis in axes:
        try:
            if axis == "packing":
                task: Any = make(name)
                task.configure_model()
                traits = task._traits
                way = "inferred" if traits.isolation is not None else "ok"
                found[axis] = way if traits.isolates_documents else "documents are not kept apart: rows are padded"
                continue
            if axis == "attention":
                found[axis] = divided_attention(name)
                continue
            if axis == "resizing":
                found[axis] = resized(name)
                continue
            refused, inferred = checked(name, axis)
            found[axis] = refused or ("inferred" if inferred else "ok")
            if axis == "tp" and not refused:
                found["difference"] = largest_difference(name)
        except Exception as error:  # A sweep over others' code goes on.
            found[axis] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def compare_sequences(found: dict[str, dict[str, Any]]) -> None:
    """Adds the largest difference of two ranks of cp from one process to types that pass; a failure is a refusal."""
    passed = [name for name, one in found.items() if one["cp"] == "ok"]
    for packs in (True, False):  # Types that keep no documents apart are compared with rows of one document.
        cases = [(name, "packed" if packs else "plain", "ring") for name in passed if "sequence" not in found[name]]
        results = run_distributed(compare, 2, cases)
        for name, kind, method in cases:
            values = [one[f"{name} {kind} {method}"] for one in results]
            errors = [value for value in values if isinstance(value, str)]
            if not errors:
                found[name]["sequence"] = max(values)
            elif not packs or "packing must be none" not in errors[0]:
                found[name]["cp"] = errors[0]


#: Two of these make a JSON one of DeepSpeed's.
DEEPSPEED_KEYS = {
    "activation_checkpointing",
    "autotuning",
    "bf16",
    "compression_training",
    "data_efficiency",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "steps_per_print",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
}


def find_deepspeed_jsons(folders: list[str]) -> tuple[list[Path], list[Path]]:
    """Returns the files with a DeepSpeed configuration, each content once, and those of them that are not JSON."""
    found: dict[str, Path] = {}
    broken: dict[str, Path] = {}
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.json") if path.is_file()):
        try:
            text = path.read_text()
            content = json.loads(text)
        except UnicodeDecodeError:
            continue
        except json.JSONDecodeError:
            if '"zero_optimization"' in text or '"train_micro_batch' in text:
                broken.setdefault(text, path)
            continue
        if isinstance(content, dict) and len(DEEPSPEED_KEYS & content.keys()) >= 2:
            found.setdefault(json.dumps(content, sort_keys=True), path)
    return [*found.values()], [*broken.values()]


def judge_json(path: Path) -> dict[str, str]:
    """Returns why dlo refuses a DeepSpeed JSON, and why DeepSpeed does; "" if it is taken."""
    found = {"dlo": "", "deepspeed": ""}
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            to_yaml(path)
        except DloError as error:
            found["dlo"] = str(error).partition(f"{path}: ")[2] or str(error)
        try:
            check_whole(json.loads(path.read_text()), str(path))
        except Exception as error:  # DeepSpeed's own code.
            found["deepspeed"] = str(error).partition(f"{path}: ")[2] or f"{type(error).__name__}: {error}"
    return found


def count_deepspeed_jsons(folders: list[str]) -> Table:
    """Prints each refusal, and returns the counts."""
    files, broken = find_deepspeed_jsons(folders)
    found = {str(path): judge_json(path) for path in files}
    for path, one in found.items():
        if one["dlo"]:
            print(f"{path}: {one['dlo'][:300]}\n    DeepSpeed: {one['deepspeed'][:200] or 'takes it'}")
    table = Table("DeepSpeed JSONs", "all of them", "files", "higher")
    takes = [not one["dlo"] for one in found.values()]
    valid = [not one["deepspeed"] for one in found.values()]
    both = sum(map(min, zip(takes, valid, strict=True)))
    size = max(1, len(found))
    table.add("taken by dlo", [sum(takes) / size], ours=True, files=sum(takes), of=len(found))
    table.add("taken by DeepSpeed", [sum(valid) / size], files=sum(valid), of=len(found))
    table.add("by both", [both / size], ours=True, files=both, of=sum(valid))
    print(f"{len(broken)} more files are not JSON (templates)")
    return table


def main() -> None:
    """Measures, and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--kinds", nargs="*", default=["text", "image"], choices=["text", "image"])
    parser.add_argument("--axes", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--deepspeed", nargs="+", metavar="FOLDER", help="folders with DeepSpeed's JSONs")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    record = Record.of(__file__, __doc__, args)
    if args.deepspeed:
        record.add(count_deepspeed_jsons(args.deepspeed))
        record.finish()
        return
    for kind in args.kinds:
        names = [name for name in (TYPES if kind == "text" else IMAGE_MODELS) if not args.only or name in args.only]
        axes = [axis for axis in args.axes if ONLY.get(axis, kind) == kind]
        found = {}
        for name in names:
            found[name] = measure(name, axes)
            print(name, {key: str(value)[:100] for key, value in found[name].items()}, flush=True)
        if kind == "text" and "cp" in axes:
            compare_sequences(found)
        title = "causal language models of transformers" if kind == "text" else "models of timm"
        table = Table(title, "all of them", "models", "higher")
        for axis in axes:
            counts = Counter(one[axis] if one[axis] in ("ok", "inferred") else "refused" for one in found.values())
            works = counts["ok"] + counts["inferred"]
            table.add(axis, [works / len(names)], ours=True, models=works, inferred=counts["inferred"], of=len(names))
        record.add(table)
        for axis, key in (("tp", "difference"), ("cp", "sequence")):
            differences = sorted(one[key] for one in found.values() if key in one)
            if differences:
                same = sum(value <= SAME for value in differences)
                print(
                    f"{kind} {axis}: {same} within {SAME:g}, median {differences[len(differences) // 2]:.0e},", end=" "
                )
                print(f"largest {differences[-1]:.0e}")
        print(json.dumps({kind: found}))
    record.finish()


if __name__ == "__main__":
    main()
