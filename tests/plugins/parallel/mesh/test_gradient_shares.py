"""Gradients of which ranks of a mesh have shares: of tied weights in several stages, of whole parameters under `tp`.

They are summed once a step: after an accumulation, several backward passes by hand, or a checkpoint in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.local_memory import local_tensor
from dlo_framework.plan import ParallelPlan
from dlo_framework.run.resume import ExactResume
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.fsdp_nets import Batches, differ, trainer
from support.runs import Watch
from support.token_batches import FAMILIES, LENGTH, VOCABULARY

ROWS, TOLERANCE = 4, 1e-5
#: Micro-batches of a step of one process; meshes share them among their ranks of data parallelism.
WINDOW, STEPS = 4, 2
MESHES: dict[str, dict[str, Any]] = {
    "pp x tp": {"pp": 2, "tp": 2, "dp_shard": 1, "micro_batches": 2},
    "tp x dp": {"tp": 2, "dp_shard": 2, "sequence_parallel": True},
    "pp x dp": {"pp": 2, "dp_shard": 2, "micro_batches": 2},
}


def mesh(name: str, **sharding: Any) -> MeshStrategy:
    return MeshStrategy(**MESHES[name], appliers=[FullyShard(**sharding)])


def fit(task: Task, batches: list[Any], strategy: Any, save: Any = None, resume: Any = None) -> dict[str, Tensor]:
    """Returns the weights that a run ends with."""
    spec = strategy.spec if isinstance(strategy, MeshStrategy) else None
    data, world = (1, 1) if spec is None else (spec.dp_shard, torch.distributed.get_world_size())
    rank = 0 if spec is None else spec.data_rank(torch.distributed.get_rank())
    window = WINDOW // data if task.automatic_optimization else 1
    callbacks = [ExactResume(), *([Watch(save, batch=window + 1)] if save is not None else [])]
    run = trainer(world, strategy, accumulate_grad_batches=window, callbacks=callbacks)
    use_canonical_checkpoints(run)
    run.fit(task, Batches(batches[rank::data]), ckpt_path=resume)
    return gather_full_weights(run)


# --- a language model: an embedding tied to the head, and norms of queries and keys that each rank of tp has whole ----


class Language(CausalLM):
    """Trains on rows without padding, so that each micro-batch counts the same; `by_hand` does its own passes."""

    def __init__(self, by_hand: bool = False, layers: int = 2) -> None:
        sizes = {**FAMILIES["qwen3"], "num_hidden_layers": layers}
        options: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, "schedule": "constant"}
        super().__init__(config={"model_type": "qwen3", **sizes}, **options)
        self.automatic_optimization = not by_hand

    def configure_model(self) -> None:
        if not self.has_model:
            torch.manual_seed(5)
        super().configure_model()


class ByHand(Language):
    """Two backward passes a step, and nothing that adds them up but the gradients."""

    def __init__(self) -> None:
        super().__init__(by_hand=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for ids, labels in zip(batch["input_ids"].chunk(2), batch["labels"].chunk(2), strict=True):
            logits = self.model(input_ids=ids).logits
            self.manual_backward(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        optimizer.step()


def texts(count: int = WINDOW * STEPS, rows: int = ROWS) -> list[Any]:
    ids = torch.randint(VOCABULARY, (count, rows, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in ids]


def shares(batch: dict[str, Tensor]) -> list[Any]:
    """Returns what each of two ranks has of a batch: its rows of the first backward pass, and of the second."""
    parts = {name: value.chunk(4) for name, value in batch.items()}
    return [{name: torch.cat([part[rank], part[2 + rank]]) for name, part in parts.items()} for rank in range(2)]


def _resumed(rank: int, world: int, folder: Path, resumed: list[str]) -> dict[str, dict[str, Tensor]]:
    """Runs that save during an accumulation, and those that take them up; one of another strategy's too."""
    found = {"pp x tp, saved by one process": fit(Language(), texts(), mesh("pp x tp"), resume=folder / "one")}
    for name, sync in (("pp x tp", True), ("tp x dp", False)):
        make: Callable[[], MeshStrategy] = partial(mesh, name, sync_every_micro_batch=sync)
        found[name] = fit(Language(), texts(), make(), save=folder / name)
        if name in resumed:
            found[f"{name}, resumed"] = fit(Language(), texts(), make(), resume=folder / name)
    return found


def _by_hand(rank: int, world: int) -> dict[str, Tensor]:
    return fit(ByHand(), [share for batch in texts(2 * STEPS) for share in shares(batch)], mesh("tp x dp"))


# --- a tied weight that stages use or leave alone --------------------------------------------------------------

#: In each micro-batch, whether the first stage uses the tied weight, and whether the last one does.
USES = ((1, 1), (0, 1), (1, 0), (0, 0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.proj = nn.Embedding(11, 8), nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head, self.other = nn.Linear(8, 11, bias=False), nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, features: Tensor, uses: tuple[int, int]) -> Tensor:
        x = self.embed(ids) if uses[0] else self.proj(features)
        for block in self.blocks:
            x = block(x)
        return self.head(x) if uses[1] else self.other(x)


class Tied(Task):
    """Its optimizer moves and decays a weight with a gradient of zeros, and leaves one without a gradient alone."""

    def configure_model(self) -> None:
        if not self.has_model:
            torch.manual_seed(0)
            self.model = Net()

    def parallel_plan(self) -> ParallelPlan:
        tied = (("embed.weight", "head.weight"),)
        return ParallelPlan(blocks=("blocks.*",), stem=("embed", "proj"), head=("head", "other"), tied=tied)

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch["ids"], batch["features"], (batch["first"], batch["last"])), {}

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1)


#: By case, what the micro-batches of three steps use, from one rank of data parallelism to the other by turns, and
#: whether gradients are divided after each of them.
TIED_CASES: dict[str, tuple[list[tuple[int, int]], bool]] = {
    "one stage a step": ([USES[0]] * 4 + [USES[1]] * 4 + [USES[2]] * 4, False),
    "the last stage on one rank": ([USES[0]] * 4 + [USES[1], USES[3], USES[3], USES[3]] + [USES[3]] * 4, True),
}


def pictures(case: str) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for first, last in TIED_CASES[case][0]:
        ids, labels = torch.randint(11, (2, ROWS), generator=draw)
        features = torch.randn(ROWS, 6, generator=draw)
        found.append({"ids": ids, "features": features, "labels": labels, "first": first, "last": last})
    return found


def _tied(rank: int, world: int, folder: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], Tensor]]:
    """Returns what a run and one that takes it up end with, and this rank's part of the tied weight then."""
    found = {}
    for number, (case, (_, sync)) in enumerate(TIED_CASES.items()):
        make: Callable[[], MeshStrategy] = partial(mesh, "pp x dp", find_unused=True, sync_every_micro_batch=sync)
        path, task = folder / f"tied {number}", Tied()
        whole = fit(Tied(), pictures(case), make(), save=path)
        resumed = fit(task, pictures(case), make(), resume=path)
        found[case] = whole, resumed, local_tensor(task.model.embed.weight).clone()
    return found


# --- all of it, on four ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [["tp x dp"], pytest.param(["pp x tp"], marks=pytest.mark.slow)])
def test_shares_are_summed_once_a_step_and_a_checkpoint_amid_it_has_the_whole(
    tmp_path: Path, resumed: list[str]
) -> None:
    """A pipeline takes up one process's checkpoint, and one process a pipeline's: the slow one is its own."""
    alone = fit(Language(), texts(), "auto", save=tmp_path / "one")
    ranks = run_distributed(_resumed, 4, tmp_path, resumed, timeout=280, group_timeout=60.0)
    found = {name: differ(weights, alone) for name, weights in ranks[0].items()}
    assert len(found) == 4
    found["one process, from a mesh"] = differ(fit(Language(), texts(), "auto", resume=tmp_path / "pp x tp"), alone)
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=TOLERANCE)


def test_backward_passes_by_hand_add_up() -> None:
    found = run_distributed(_by_hand, 4, timeout=100, group_timeout=60.0)[0]
    assert differ(found, fit(ByHand(), texts(2 * STEPS), "auto")) < TOLERANCE


def test_a_tied_weight_is_used_where_any_stage_has_used_it(tmp_path: Path) -> None:
    found = run_distributed(_tied, 4, tmp_path, timeout=280, group_timeout=60.0)
    assert found[0].keys() == TIED_CASES.keys()
    for case, (whole, resumed, _) in found[0].items():
        expected = fit(Tied(), pictures(case), "auto")
        assert differ(whole, expected) < TOLERANCE, case
        assert differ(resumed, expected) < TOLERANCE, f"{case}, resumed"
        for first, last in ((0, 2), (1, 3)):  # Of the same rank of data parallelism in both stages.
            assert torch.equal(found[first][case][2], found[last][case][2]), case
