"""Evaluation counts each sample once, whatever is left for the last ranks: in one process and under each strategy."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from dlo_framework.data import CountedBatch, Draw
from dlo_framework.data.evaluation import DistributedEvalLoader, UnrepeatedSampler, without_repeats, without_rows
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.run.resume import give_generator
from dlo_framework.testing import run_distributed
from dlo_framework.watch.predictions import SavePredictions
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from support import strategies
from support.evaluated import KINDS, Kind, Mse, Plain, PlainSamples, Samples, Whole, measured, trainer

LEFT_OUT = {1, 4, 5}


class Holes(Whole):
    """Leaves some samples out: of the first batch of two one, of the third both."""

    def fetch(self, draws: list[Draw]) -> CountedBatch:
        kept = [draw for draw in draws if draw.index not in LEFT_OUT]
        return CountedBatch(super().fetch(kept or draws[:1]), len(kept))


def holes(module: type) -> tuple[Kind, Samples]:
    kind = Kind(module, lambda x, y, c: Holes(x, y))
    return kind, Samples(kind, samples=7, batch_size=2)


def squares(data: Samples) -> Tensor:
    task, dataset = Mse(), data.val_dataloader().dataset
    task.configure_model()
    outputs = task.model.eval()(dataset.x).detach()
    return (outputs - dataset.y).square().mean(1)[[i for i in range(7) if i not in LEFT_OUT]]


@pytest.mark.parametrize("module", [Mse, Plain])
def test_what_a_dataset_leaves_out_counts_for_nothing(module: type) -> None:
    kind, data = holes(module)
    run, made = trainer(1, "auto"), kind.module()
    run.validate(made, data, verbose=False)
    expected = squares(data)
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(float(expected.mean()), rel=1e-5)
    if isinstance(made, Plain):
        assert float(run.callback_metrics["val_count"]) == len(expected)
        assert made.calls == 3
    parts = run.predict(made, data)
    assert [len(part) for part in parts] == [1, 2, 0, 1]
    assert not {"validation_step", "predict_step"} & vars(run.strategy).keys()


def test_loaders_in_parallel_are_refused_where_one_has_no_sample() -> None:
    kind, data = holes(Mse)

    class Two(Samples):
        def val_dataloader(self) -> CombinedLoader:
            return CombinedLoader([data.val_dataloader(), self._loader("other")], "max_size")

    both = Two(kind, samples=7, batch_size=2)
    data.trainer = run = trainer(1, "auto")

    class First(Mse):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch[0], batch_idx)

    with pytest.raises(DloError, match="validation_step must get one batch of one loader at a time"):
        run.validate(First(), both, verbose=False)


def test_a_prediction_of_no_samples_has_no_rows() -> None:
    one = torch.ones(1, 3)
    assert without_rows(one).shape == (0, 3)
    assert without_rows([{"text": "a"}]) == []
    assert {key: len(value) for key, value in without_rows({"a": one, "b": ["x"]}).items()} == {"a": 0, "b": 0}
    assert [len(part) for part in without_rows((one, one))] == [0, 0]
    for unknown in (torch.ones(3, 1), torch.ones(()), {"a": one, "b": 2}, (one, None), "text", None):
        assert without_rows(unknown) is None


# --- evaluation is one process's: each sample counts once, whatever is left for the last ranks -----------------------


#: Those of plain data parallelism, on any number of ranks.
STRATEGIES: dict[str, Any] = {
    "ddp": DataParallelStrategy,
    "lightning's ddp": strategies.STRATEGIES["ddp"],
    **{name: strategies.STRATEGIES[name] for name in ("zero1", "zero3", "fsdp", "deepspeed_3")},
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
    pairs += [(name, "classes") for name in STRATEGIES]
    pairs += [(name, "plain") for name in ("lightning's ddp", "zero3", "fsdp")]
    cases = [(OURS, *pair, *SIZES[2][i % 4]) for i, pair in enumerate(dict.fromkeys(pairs))]
    plain = [("ddp", "classes"), ("zero3", "mse"), ("zero3", "plain"), ("fsdp", "classes")]
    cases += [(LIGHTNINGS, *pair, *sizes) for pair, sizes in zip(plain, PLAIN_SIZES, strict=True)]
    torchs = [("workers", "zero3", "mse"), ("an own sampler", "ddp", "mse"), ("an own sampler", "zero3", "classes")]
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


class Indices(BasePredictionWriter):
    """Keeps the indices of the samples that predictions are of."""

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.found = [index for batch in batch_indices[0] for index in batch]


def _predicted(rank: int, world: int, cases: list[Case], folder: Path) -> list[tuple[int, list[int]]]:
    """Returns the number of predictions, and the indices of their samples, in each case."""
    found = []
    for number, (data, name, kind, *sizes) in enumerate(cases):
        writer = Indices("epoch")
        run = trainer(
            world, (STRATEGIES | MESHES)[name](), callbacks=[SavePredictions(folder / f"{number}.pt"), writer]
        )
        parts = run.predict(KINDS[kind].module(), DATA[data](KINDS[kind], *sizes))
        found.append((sum(len(part["sums"] if isinstance(part, dict) else part) for part in parts), writer.found))
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_sample_is_predicted_once_and_in_order(world: int, tmp_path: Path) -> None:
    """Under zero3 and fsdp a rank without a last batch of torch's loader would leave the others in their forward."""
    pairs = [(name, "mse") for name in STRATEGIES if name != "zero1"] + [("ddp", "plain"), ("zero3", "columns")]
    cases = [(OURS, *pair, *SIZES[2][i % 4]) for i, pair in enumerate(pairs)]
    cases += [(LIGHTNINGS, name, "mse", *sizes) for name in ("zero3", "fsdp") for sizes in PLAIN_SIZES[1:3]]
    cases += [("an own sampler", "ddp", "mse", *PLAIN_SIZES[1])]
    if world == 4:
        cases = on_meshes({"pp": ["mse"]})
    by_rank = run_distributed(_predicted, world, cases, tmp_path)
    for number, (data, _, kind, samples, batch_size) in enumerate(cases):
        alone = Samples if data == OURS else PlainSamples
        one = trainer(1, "auto").predict(KINDS[kind].module(), alone(KINDS[kind], samples, batch_size))
        found = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        if kind == "columns":  # Dicts stay a list of batches.
            found, one = torch.cat([part["sums"] for part in found]), [part["sums"] for part in one]
        torch.testing.assert_close(found, torch.cat(one), rtol=2e-5, atol=1e-5)
        assert sum(ranks[number][0] for ranks in by_rank) == samples * world // 2
        if data != OURS:
            assert sorted(index for ranks in by_rank for index in ranks[number][1]) == list(range(samples))


# --- each sample of a torch DistributedSampler counts once over the ranks, which have equally many batches -----------


LENGTHS = st.integers(1, 23), st.integers(1, 5), st.integers(1, 4)


def shares(kind: type, total: int, ranks: int, batch_size: int, drop_last: bool, **options: Any) -> list[Any]:
    dealt = [kind(range(total), ranks, rank, **options) for rank in range(ranks)]
    return [UnrepeatedSampler(sampler, batch_size, drop_last) for sampler in dealt]


@given(*LENGTHS, st.booleans())
def test_each_sample_counts_once_and_ranks_have_equally_many_batches(total, ranks, batch_size, shuffle):
    kinds = [DistributedSampler] + ([UnrepeatedDistributedSampler] if total >= ranks else [])
    for kind in kinds:
        found = shares(kind, total, ranks, batch_size, False, shuffle=shuffle)
        assert sorted(index for share in found for index in list(share)[: share.samples]) == list(range(total))
        assert all(len(list(share)) == len(share) for share in found)
        assert len({-(-len(share) // batch_size) for share in found}) == 1
        # Only a batch without any sample that counts holds another.
        assert all(len(share) == share.samples or share.samples % batch_size == 0 for share in found)


@given(*LENGTHS)
def test_with_drop_last_no_sample_counts_twice(total, ranks, batch_size):
    found = shares(DistributedSampler, total, ranks, batch_size, True, shuffle=False)
    kept = [index for share in found for index in share]
    assert len(set(kept)) == len(kept) == total // ranks * ranks


class Stage(SimpleNamespace):
    """A trainer in one of its stages, or in training; it can be referred to weakly."""


def stage(name: str = "") -> Any:
    return Stage(**{other: other == name for other in ("sanity_checking", "validating", "testing", "predicting")})


def dealt_loader(total: int = 9, **options: Any) -> DataLoader:
    return DataLoader(range(total), sampler=DistributedSampler(range(total), 2, 1, shuffle=False), **options)  # type: ignore[arg-type]


def test_what_needs_no_change_has_none():
    for loader in ([1, 2], DataLoader(range(9)), dealt_loader(8)):  # type: ignore[arg-type]
        assert without_repeats(loader, stage("validating")) is loader
    loader = dealt_loader()
    assert without_repeats(loader, stage()) is loader, "in training shares are equally long"
    changed = without_repeats(loader, stage("testing"))
    assert isinstance(changed, DistributedEvalLoader)
    assert len(list(loader)) == 5, "the user's own is as it was"
    assert changed.dataset is loader.dataset


class Numbered(BatchSampler):
    """A batch sampler whose batches are its own affair."""


class InChunks(DistributedSampler):
    """A sampler that deals a chunk of consecutive samples to each rank, so that the repeated ones are one rank's."""

    def __iter__(self):
        indices = [index % len(self.dataset) for index in range(self.total_size)]  # type: ignore[arg-type]
        return iter(indices[self.rank * self.num_samples :][: self.num_samples])


def test_samplers_with_an_order_of_their_own_are_warned_of():
    sampler = DistributedSampler(range(9), 2, 1, shuffle=False)
    for name, options in (
        ("Numbered", {"batch_sampler": Numbered(sampler, 2, False)}),
        ("InChunks", {"sampler": InChunks(range(9), 4, 3, shuffle=False)}),
    ):
        loader = DataLoader(range(9), **options)
        message = f"each of 9 samples once, got {name}, so that some may be evaluated twice"
        with pytest.warns(UserWarning, match=message):
            assert without_repeats(loader, stage("validating")) is loader
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = DataLoader(range(9), batch_sampler=Numbered(SequentialSampler(range(9)), 2, False))  # type: ignore[arg-type]
        assert without_repeats(plain, stage("validating")) is plain


def test_what_lightning_and_an_exact_resume_set_reaches_the_loader(monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    changed = without_repeats(dealt_loader(), stage("validating"))
    _auto_add_worker_init_fn(changed, 0)
    give_generator(changed)
    before = torch.get_rng_state()
    iter(changed.loader)
    assert torch.equal(torch.get_rng_state(), before), "a validation must not draw from the training's stream"
    assert changed.loader.worker_init_fn is not None


def test_a_second_trainer_gets_a_loader_of_its_own():
    first = without_repeats(dealt_loader(), stage("validating"))
    trainer = stage("testing")
    second = without_repeats(first, trainer)
    assert second._trainer() is trainer
    assert second.loader is first.loader
