"""What the check before a run accepts runs: every type of causal language model, and a model of each timm module.

The models are transformers' and timm's own, with random weights. Where the check of a mesh passes, two gloo ranks train
two steps, and their losses are those of one process. All models of a sweep share the ranks, until one fails.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group, quiet
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.llm.causal_lm import CausalLM
from support.causal_lm_types import VOCABULARY, tiny_config, type_names
from support.token_batches import Batches

ROWS, LENGTH, STEPS = 4, 16, 2
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "dp_shard": 1},
    "pp": {"pp": 2, "dp_shard": 1, "micro_batches": 2},
    "cp": {"cp": 2, "dp_shard": 1},
}
OFF = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
#: Losses in single precision, whose last bits depend on the order of sums; experts are chosen by them.
RTOL = 2e-4


class Shapes:
    """What a datamodule tells of its batches before it has read any."""

    seq_len, batch_size, num_classes = LENGTH, ROWS, 3


class Losses(Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))


def make(kind: str, name: str) -> Task:
    if kind == "text":
        return CausalLM(config=tiny_config(name), optimizer="sgd", lr=0.1, schedule="constant")
    size = 64 if name in IMAGE_SIZES else None
    task = ImageClassifier(name, num_classes=3, image_size=size, optimizer="sgd", lr=0.1, schedule="constant")
    task.model_args |= IMAGE_ARGUMENTS
    return task


IMAGE_SIZES: tuple[str, ...] = ()
IMAGE_ARGUMENTS: dict[str, Any] = {}


def batches(kind: str, task: Any) -> list[Any]:
    draw = torch.Generator().manual_seed(3)
    found: list[Any] = []
    for _ in range(STEPS):
        if kind == "image":
            side = task.image_size or 224
            images = torch.randn(ROWS, 3, side, side, generator=draw)
            found.append((images, torch.randint(3, (ROWS,), generator=draw)))
            continue
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
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
    seed_everything(1, workers=True, verbose=False)
    task, losses = make(kind, name), Losses()
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=STEPS, callbacks=[losses], **OFF)
    trainer.fit(task, DataLoader(Batches(batches(kind, task)), batch_size=None))
    return losses.found


def _train_all(rank: int, world_size: int, kind: str, jobs: list[tuple[str, str]]) -> list[tuple[list[float], str]]:
    """Trains on ranks until one fails: then the ranks' collectives no longer match."""
    quiet()
    store = dist.distributed_c10d._get_default_store()
    found: list[tuple[list[float], str]] = []
    for number, (name, mesh) in enumerate(jobs):
        losses, error = [], ""
        try:
            losses = train(kind, name, MeshStrategy(**MESHES[mesh]), world_size)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {str(raised)[:300]}"
        found.append((losses, error))
        store.set(f"{number}/{rank}", error)
        other = f"{number}/{1 - rank}"
        with contextlib.suppress(dist.DistStoreError):
            store.wait([other], timedelta(seconds=60))
            if not error and not store.get(other):
                continue
        break
    leave_group()
    return found


def trained(kind: str, jobs: list[tuple[str, str]]) -> Iterator[tuple[list[float], str]]:
    """Yields what each job's ranks have found: losses, or the error of the first that raised."""
    left = list(jobs)
    while left:
        answers = run_distributed(_train_all, 2, kind, left, timeout=3000, group_timeout=20)
        for one, other in zip(*answers, strict=True):
            # The ranks of cp have the losses of other tokens; those of the others the same.
            yield [sum(pair) / 2 for pair in zip(one[0], other[0], strict=False)], one[1] or other[1]
        left = left[len(answers[0]) :]


def sweep(kind: str, names: list[str], meshes: list[str]) -> dict[str, str]:
    """Returns for each model and mesh `refused: why`, `runs`, or what is wrong."""
    quiet()
    found: dict[str, str] = {}
    alone: dict[str, list[float]] = {}
    jobs: list[tuple[str, str]] = []
    for name in names:
        try:
            alone[name] = train(kind, name, "auto", 1)
        except Exception as error:  # It does not train on one process either: nobody's plan is at fault.
            found[name] = f"no model: {type(error).__name__}: {str(error)[:300]}"
            continue
        for mesh in meshes:
            try:
                refused = verdict(kind, name, mesh)
            except Exception as error:
                found[f"{name}/{mesh}"] = f"wrong: the check raises {type(error).__name__}: {str(error)[:300]}"
                continue
            if refused is None:
                jobs.append((name, mesh))
            else:
                found[f"{name}/{mesh}"] = f"refused: {refused}"
    for (name, mesh), (losses, error) in zip(jobs, trained(kind, jobs), strict=True):
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
    if path := os.environ.get("DLO_SWEEP_REPORT"):
        with open(path, "w") as file:
            json.dump(found, file, indent=1)
    wrong = {name: value for name, value in found.items() if value.startswith("wrong")}
    assert not wrong, wrong
    assert counts["runs"] >= least, counts


@pytest.mark.slow
def test_each_type_of_causal_language_model_that_passes_its_check_trains_as_one_process() -> None:
    only = os.environ.get("DLO_SWEEP_ONLY", "").split()
    check_sweep(sweep("text", only or type_names(), list(MESHES)), 0 if only else 200)
