"""What the check before a run accepts runs: every type of causal language model, and a model of each timm module.

The models are transformers' and timm's own, with random weights. Where the check of a mesh passes, two gloo ranks train
two steps, and their losses are those of one process. All models of a sweep share the ranks, until one fails.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_framework.testing import RankFailed, run_distributed
from dlo_framework.testing.spawn import process_context
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import SIZES, TYPES, tiny
from support.image_models import IMAGE_MODELS, TRANSFORMERS, options
from support.runs import Losses
from support.token_batches import Batches

ROWS, LENGTH, STEPS = 4, 16, 2
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "dp_shard": 1},
    "pp": {"pp": 2, "dp_shard": 1, "micro_batches": 2},
    "cp": {"cp": 2, "dp_shard": 1},
}
#: Models and meshes that ranks train before others take their place: each leaves process groups behind.
AT_ONCE = 40
OFF = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
#: Models that are to run at least.
LEAST = {"tp": 120, "pp": 120, "cp": 80, "image": 80, "transformers": 24}
#: Losses in single precision, whose last bits depend on the order of sums; experts are chosen by them.
RTOL = 2e-4


class Shapes:
    """What a datamodule tells of its batches before it has read any."""

    seq_len, batch_size, num_classes = LENGTH, ROWS, 3


def make(kind: str, name: str) -> Task:
    if kind == "text":
        return CausalLM(config=tiny(name, dropout=False), optimizer="sgd", lr=0.1, schedule="constant")
    return ImageClassifier(name, num_classes=3, optimizer="sgd", lr=0.01, schedule="constant", **options(name))


def batches(kind: str, task: Any) -> list[Any]:
    draw = torch.Generator().manual_seed(3)
    found: list[Any] = []
    for _ in range(STEPS):
        if kind == "image":
            images = torch.randn(ROWS, 3, task.image_size, task.image_size, generator=draw)
            found.append((images, torch.randint(3, (ROWS,), generator=draw)))
            continue
        ids = torch.randint(3, SIZES["vocab_size"], (ROWS, LENGTH + 1), generator=draw)
        batch = {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
        batch["position_ids"] = torch.arange(LENGTH).expand(ROWS, LENGTH).clone()
        found.append(batch | {"tokens_in_step": torch.tensor(ROWS * LENGTH)})
    return found


def strategy_of(mesh: str) -> MeshStrategy:
    """A strategy as a Trainer of two ranks has it before they start."""
    strategy = MeshStrategy(**MESHES[mesh])
    Trainer(accelerator="cpu", devices=2, strategy=strategy, **OFF)
    return strategy


def verdict(kind: str, name: str, mesh: str) -> str | None:
    """Returns why the check refuses a model; None if it passes."""
    with torch.random.fork_rng():
        task = make(kind, name)
        strategy = strategy_of(mesh)
        try:
            strategy.check_model(task, Shapes())
            strategy.describe(task, Shapes())
        except DloError as error:
            return str(error)
    return None


def train(kind: str, name: str, strategy: Any, devices: int) -> list[float]:
    """Returns the losses of two steps; one process takes images by micro-batches, which batch norm sees apart."""
    seed_everything(1, workers=True, verbose=False)
    task, losses = make(kind, name), Losses()
    found, parts = batches(kind, task), 1
    if kind == "image" and devices == 1:
        found, parts = [halves for x, y in found for halves in zip(x.chunk(2), y.chunk(2), strict=True)], 2
    options = {**OFF, "max_steps": STEPS, "accumulate_grad_batches": parts, "callbacks": [losses]}
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, **options)
    trainer.fit(task, DataLoader(Batches(found), batch_size=None))
    return [sum(losses.found[first : first + parts]) for first in range(0, len(losses.found), parts)]


def check(job: tuple[str, str, list[str]]) -> tuple[dict[str, str], list[float]]:
    """Returns what the check says of a model on each mesh, `refused: why` or "", and its losses on one process."""
    kind, name, meshes = job
    try:
        alone = train(kind, name, "auto", 1)
    except Exception as error:  # It does not train on one process either: nobody's plan is at fault.
        return {name: f"no model: {_said(error)}"}, []
    found = {}
    for mesh in meshes:
        try:
            refused = verdict(kind, name, mesh)
        except Exception as error:
            found[f"{name}/{mesh}"] = f"wrong: the check raises {_said(error)}"
        else:
            found[f"{name}/{mesh}"] = f"refused: {refused}" if refused is not None else ""
    return found, alone


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _train_all(rank: int, world_size: int, kind: str, jobs: list[tuple[str, str]], folder: str) -> None:
    """Trains on ranks until one fails, and writes what each has found to a file: one that fails ends the others."""
    for name, mesh in jobs:
        losses, error = [], ""
        try:
            losses = train(kind, name, MeshStrategy(**MESHES[mesh]), world_size)
        except BaseException as raised:
            error = _said(raised)
        with open(Path(folder, str(rank)), "a") as file:
            file.write(json.dumps([losses, error]) + "\n")
        if error:
            raise RuntimeError(error)


def trained(kind: str, jobs: list[tuple[str, str]]) -> Iterator[tuple[list[float], str]]:
    """Yields what each job's ranks have found: losses, or the error of the first that raised."""
    left = list(jobs)
    while left:
        started = left[:AT_ONCE]
        with TemporaryDirectory() as folder:
            try:
                run_distributed(_train_all, 2, kind, started, folder, timeout=3000, group_timeout=60)
                failed = ""
            except RankFailed as error:
                failed = str(error)
            files = [Path(folder, str(rank)) for rank in range(2)]
            found = [[json.loads(line) for line in file.open()] if file.exists() else [] for file in files]
        done = 0
        for (one, wrong), (other, wrong_too) in zip(*found, strict=False):
            if wrong or wrong_too:
                break
            # The ranks of cp have the losses of other tokens; those of the others the same.
            yield [sum(pair) / 2 for pair in zip(one, other, strict=True)], ""
            done += 1
        if failed:
            errors = [lines[done][1] for lines in found if len(lines) > done and lines[done][1]]
            yield [], errors[0] if errors else failed[:300]
            done += 1
        left = left[done:]


def sweep(kind: str, names: list[str], meshes: list[str]) -> dict[str, str]:
    """Returns for each model and mesh `refused: why`, `runs`, or what is wrong."""
    found: dict[str, str] = {}
    alone: dict[str, list[float]] = {}
    with ProcessPoolExecutor(2, mp_context=process_context()) as checkers:
        for name, (verdicts, losses) in zip(
            names, checkers.map(check, [(kind, n, meshes) for n in names]), strict=True
        ):
            found |= verdicts
            alone[name] = losses
    accepted = [(name, mesh) for name in names for mesh in meshes if found.get(f"{name}/{mesh}") == ""]
    for (name, mesh), (losses, error) in zip(accepted, trained(kind, accepted), strict=True):
        wrong = error or _difference(losses, alone[name])
        found[f"{name}/{mesh}"] = f"wrong: {wrong}" if wrong else "runs"
    return found


def _difference(losses: list[float], expected: list[float]) -> str:
    one, other = torch.tensor(losses), torch.tensor(expected)
    if one.shape == other.shape and torch.allclose(one, other, rtol=RTOL, atol=0):
        return ""
    return f"losses {losses}, one process {expected}"


def check_sweep(found: dict[str, str], least: int) -> None:
    counts = Counter(value.partition(":")[0] for value in found.values())
    print(dict(counts))
    wrong = {name: value for name, value in found.items() if value.startswith("wrong")}
    assert not wrong, wrong
    assert counts["runs"] >= least, counts


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("mesh", MESHES)
def test_each_type_of_causal_language_model_that_passes_its_check_trains_as_one_process(mesh: str) -> None:
    only = os.environ.get("DLO_SWEEP_ONLY", "").split()
    check_sweep(sweep("text", only or TYPES, [mesh]), 0 if only else LEAST[mesh])


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_each_module_of_timm_that_passes_the_check_of_a_pipeline_trains_as_one_process() -> None:
    only = os.environ.get("DLO_SWEEP_ONLY", "").split()
    check_sweep(sweep("image", only or IMAGE_MODELS, ["pp"]), 0 if only else LEAST["image"])


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_each_transformer_of_timm_whose_heads_divide_trains_under_tensor_parallelism() -> None:
    only = os.environ.get("DLO_SWEEP_ONLY", "").split()
    check_sweep(sweep("image", only or TRANSFORMERS, ["tp"]), 0 if only else LEAST["transformers"])
