"""Evaluation is one process's: each sample counts once, whatever is left for the last ranks."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.testing import run_distributed
from dlo_framework.watch.predictions import SavePredictions
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.evaluated import KINDS, Plain, PlainSamples, Samples, measured, trainer

#: Those of plain data parallelism, on any number of ranks.
STRATEGIES = {
    "ddp": DataParallelStrategy,
    "lightning's ddp": lambda: "ddp",
    "zero1": lambda: ZeroStrategy(1),
    "zero3": lambda: ZeroStrategy(3),
    "fsdp": FSDPStrategy,
    "deepspeed": lambda: DeepSpeedBridge(3),
}
#: On four ranks, two of them with other data. The second gathers parameters for each micro-batch.
MESHES = {
    "pp": lambda: MeshStrategy(pp=2, dp_replicate=2),
    "pp, gathered often": lambda: MeshStrategy(pp=2, dp_shard=2, appliers=[FullyShard(reshard_after_forward=True)]),
    "tp": lambda: MeshStrategy(tp=2, dp_shard=2),
    "cp": lambda: MeshStrategy(cp=2, dp_shard=2),
}
#: Samples and batch sizes, by the number of ranks with other data: shares that differ, last batches of fewer samples
#: than ranks, batches of one sample for each rank, and fewer samples than ranks.
SIZES = {
    2: [(9, 4), (7, 2), (1, 4), (7, 4)],
    3: [(10, 6), (11, 3), (2, 6)],
    4: [(9, 8), (6, 4), (1, 4), (14, 8), (3, 8)],
}

#: Samples and batch sizes of a rank with torch's loader: shares that differ, one rank without a last batch, one without
#: any sample.
PLAIN_SIZES = [(9, 4), (5, 2), (3, 1), (1, 4)]
#: Data by name; each but the first has torch's loaders.
DATA: dict[str, Any] = {
    "dlo's loader": Samples,
    "Lightning's sampler": PlainSamples,
    "an own sampler": partial(PlainSamples, own_sampler=True),
    "workers": partial(PlainSamples, num_workers=1, persistent_workers=True),
}
OURS, LIGHTNINGS, *_ = DATA
#: Data, strategy, kind of batches, samples and batch size.
Case = tuple[str, str, str, int, int]


def _all(rank: int, world: int, cases: list[Case]) -> list[dict[str, float]]:
    known = STRATEGIES | MESHES
    return [measured(world, known[name](), *case, data=DATA[data]) for data, name, *case in cases]


def check(world: int, cases: list[Case]) -> None:
    by_rank = run_distributed(_all, world, cases, timeout=900)
    for number, (data, _, *case) in enumerate(cases):
        expected = measured(1, "auto", *case, data=Samples if data == OURS else PlainSamples)
        assert "val_loss" in expected or data != OURS
        for found in by_rank:
            assert found[number] == pytest.approx(expected, rel=2e-5, abs=1e-6), cases[number]


def on_meshes(kinds: dict[str, list[str]]) -> list[Case]:
    return [(OURS, mesh, kind, *sizes) for mesh, chosen in kinds.items() for kind in chosen for sizes in SIZES[2]]


def test_on_two_ranks_it_is_that_of_one() -> None:
    """Each kind of batch and each strategy, with one of the sizes."""
    pairs = [("ddp", kind) for kind in KINDS] + [("zero3", "columns")]
    pairs += [(name, kind) for name in STRATEGIES for kind in ("classes", "plain")]
    cases = [(OURS, *pair, *SIZES[2][i % 4]) for i, pair in enumerate(dict.fromkeys(pairs))]
    plain = [("ddp", "classes"), ("zero3", "mse"), ("zero3", "plain"), ("fsdp", "classes")]
    torchs = [(LIGHTNINGS, *pair) for pair in plain] + [("workers", "zero3", "mse")]
    torchs += [("an own sampler", "ddp", "mse"), ("an own sampler", "zero3", "classes")]
    check(2, cases + [(*one, *PLAIN_SIZES[(i + k) % 4]) for i, one in enumerate(torchs) for k in (0, 1)])


@pytest.mark.slow
def test_torchs_loaders_repeat_no_sample_on_a_mesh() -> None:
    check(4, [(LIGHTNINGS, mesh, "mse", *sizes) for mesh in ("pp", "tp") for sizes in PLAIN_SIZES[:3]])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_torchs_loaders_under_every_strategy(world: int) -> None:
    kinds = ("mse", "classes", "dicts", "plain")
    own = [name for name in STRATEGIES if name != "lightning's ddp"]
    check(world, [(LIGHTNINGS, name, kind, *sizes) for name in own for kind in kinds for sizes in PLAIN_SIZES])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_kind_under_every_strategy(world: int) -> None:
    cases = [(OURS, name, kind, *sizes) for name in STRATEGIES for kind in KINDS for sizes in SIZES[world]]
    if world == 4:
        cut = ["mse", "classes", "dicts", "whole"]
        cases += on_meshes({mesh: cut for mesh in MESHES if mesh != "cp"} | {"cp": ["tokens"]})
    check(world, cases)


class Pairs(PlainSamples):
    """Two loaders that run in parallel."""

    def val_dataloader(self) -> Any:
        return CombinedLoader([super().val_dataloader(), super().val_dataloader()], "max_size")


class FirstOfPair(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().validation_step(batch[0], batch_idx)


def _in_parallel(rank: int, world: int) -> tuple[float, list[str]]:
    run = trainer(world, DataParallelStrategy())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.validate(FirstOfPair(), Pairs(KINDS["plain"], 5, 2), verbose=False)
    return float(run.callback_metrics["val_count"]), [str(w.message) for w in caught if "in parallel" in str(w.message)]


def test_loaders_in_parallel_repeat_a_sample_with_a_warning() -> None:
    (count, messages), (_, others) = run_distributed(_in_parallel, 2)
    assert count == 6
    assert "evaluate each of 5 samples once, got loaders in parallel" in messages[0]
    assert not others, "rank 0 speaks for all"


def _predicted(rank: int, world: int, cases: list[Case], folder: Path) -> list[int]:
    counts = []
    for number, (data, name, kind, *sizes) in enumerate(cases):
        callback = SavePredictions(folder / f"{number}.pt")
        run = trainer(world, (STRATEGIES | MESHES)[name](), callbacks=[callback])
        parts = run.predict(KINDS[kind].module(), DATA[data](KINDS[kind], *sizes))
        counts.append(sum(len(part["sums"] if isinstance(part, dict) else part) for part in parts))
    return counts


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_sample_is_predicted_once_and_in_order(world: int, tmp_path: Path) -> None:
    """Under zero3 and fsdp a rank without a last batch of torch's loader would leave the others in their forward."""
    pairs = [(name, "mse") for name in STRATEGIES if name != "zero1"] + [("ddp", "plain"), ("zero3", "columns")]
    cases = [(OURS, *pair, *SIZES[2][i % 4]) for i, pair in enumerate(pairs)]
    cases += [(LIGHTNINGS, name, "mse", *sizes) for name in ("zero3", "fsdp") for sizes in PLAIN_SIZES[1:3]]
    if world == 4:
        cases = on_meshes({"pp": ["mse"]})
    counts = run_distributed(_predicted, world, cases, tmp_path)
    for number, (data, _, kind, samples, batch_size) in enumerate(cases):
        one = trainer(1, "auto").predict(KINDS[kind].module(), DATA[data](KINDS[kind], samples, batch_size))
        found = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        if kind == "columns":  # Dicts stay a list of batches.
            found, one = torch.cat([part["sums"] for part in found]), [part["sums"] for part in one]
        torch.testing.assert_close(found, torch.cat(one), rtol=2e-5, atol=1e-5)
        assert sum(ranks[number] for ranks in counts) == samples * world // 2


class Indices(BasePredictionWriter):
    """Keeps the indices of the samples that predictions are of."""

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.found = [index for batch in batch_indices[0] for index in batch]


def _indices(rank: int, world: int, names: list[str], size: tuple[int, int], data: str) -> list[list[int]]:
    found = []
    for name in names:
        writer = Indices("epoch")
        run = trainer(world, STRATEGIES[name](), callbacks=[writer])
        run.predict(KINDS["mse"].module(), DATA[data](KINDS["mse"], *size))
        found.append(writer.found)
    return found


@pytest.mark.parametrize("data", ["Lightning's sampler", pytest.param("an own sampler", marks=pytest.mark.slow)])
def test_a_prediction_writer_gets_each_index_of_torchs_loader_once(data: str) -> None:
    by_rank = run_distributed(_indices, 2, ["ddp", "zero3"], (5, 2), data)
    for found in zip(*by_rank, strict=True):
        assert sorted(index for indices in found for index in indices) == list(range(5))
