"""What the check before a run accepts runs: every type of causal language model, and a model of each timm module.

The models are transformers' and timm's own, with random weights. Where the check of a mesh passes, two gloo ranks train
two steps, and their losses are those of one process. Many models of a sweep share the ranks.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import SIZES, TYPES, tiny
from support.image_models import IMAGE_MODELS, TRANSFORMERS, options
from support.runs import Losses
from support.token_batches import Batches
from support.trainers import quiet_trainer

ROWS, LENGTH, STEPS = 4, 16, 2
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "dp_shard": 1},
    "pp": {"pp": 2, "dp_shard": 1, "micro_batches": 2},
    "cp": {"cp": 2, "dp_shard": 1},
}
#: Models that ranks train before others take their place: each leaves process groups behind.
AT_ONCE = 40
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
    quiet_trainer(devices=2, strategy=strategy)
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
    options = {"max_steps": STEPS, "accumulate_grad_batches": parts, "callbacks": [losses]}
    trainer = quiet_trainer(devices=devices, strategy=strategy, **options)
    trainer.fit(task, DataLoader(Batches(found), batch_size=None))
    return [sum(losses.found[first : first + parts]) for first in range(0, len(losses.found), parts)]


def check(kind: str, name: str, mesh: str) -> tuple[str, list[float]]:
    """Returns what the check says of a model on a mesh, `refused: why` or "", and its losses on one process."""
    try:
        alone = train(kind, name, "auto", 1)
    except Exception as error:  # It does not train on one process either: nobody's plan is at fault.
        return f"no model: {_said(error)}", []
    try:
        refused = verdict(kind, name, mesh)
    except Exception as error:
        return f"wrong: the check raises {_said(error)}", alone
    return f"refused: {refused}" if refused is not None else "", alone


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _check_share(rank: int, ranks: int, kind: str, names: list[str], mesh: str) -> dict[str, tuple[str, list[float]]]:
    return {name: check(kind, name, mesh) for name in names[rank::ranks]}


def _train_all(rank: int, world_size: int, kind: str, names: list[str], mesh: str) -> list[list[float]]:
    found = []
    for name in names:
        try:
            found.append(train(kind, name, MeshStrategy(**MESHES[mesh]), world_size))
        except Exception as error:
            raise AssertionError(f"{name}, which the check accepts, raises {_said(error)}") from error
    return found


def _difference(losses: list[float], expected: list[float]) -> str:
    one, other = torch.tensor(losses), torch.tensor(expected)
    if one.shape == other.shape and torch.allclose(one, other, rtol=RTOL, atol=0):
        return ""
    return f"losses {losses}, one process {expected}"


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    ("kind", "names", "mesh", "least"),
    [
        ("text", TYPES, "tp", 120),
        ("text", TYPES, "pp", 120),
        ("text", TYPES, "cp", 80),
        ("image", IMAGE_MODELS, "pp", 80),
        ("image", TRANSFORMERS, "tp", 24),
    ],
)
def test_each_model_that_passes_its_check_trains_as_one_process(
    kind: str, names: list[str], mesh: str, least: int
) -> None:
    """At least so many pass; `DLO_SWEEP_ONLY` selects some."""
    only = os.environ.get("DLO_SWEEP_ONLY", "").split()
    names = only or names
    one, other = run_distributed(_check_share, 2, kind, names, mesh, backend=None, timeout=3 * 3600)
    checked = one | other
    found = {name: said for name, (said, _) in checked.items()}
    accepted = [name for name in names if not found[name]]
    for start in range(0, len(accepted), AT_ONCE):
        some = accepted[start : start + AT_ONCE]
        ranks = run_distributed(_train_all, 2, kind, some, mesh, timeout=3000, group_timeout=60)
        for name, first, second in zip(some, *ranks, strict=True):
            # The ranks of cp have the losses of other tokens; those of the others the same.
            means = [sum(pair) / 2 for pair in zip(first, second, strict=True)]
            wrong = _difference(means, checked[name][1])
            found[name] = f"wrong: {wrong}" if wrong else "runs"
    counts = Counter(said.partition(":")[0] for said in found.values())
    wrong_ones = {name: said for name, said in found.items() if said.startswith("wrong")}
    assert not wrong_ones, wrong_ones
    assert only or counts["runs"] >= least, counts
