"""TextData of several sources: proportions, exact resume on other ranks, kills, processes that tokenise, refusals."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.data import ResumableLoader
from dlo_framework.errors import DloError
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.training import leave_group
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.step_tokens import AccumulationPlan, TextBatchSampler
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.token_cache import Document, TokenStore, write_store
from dlo_tasks.language.token_windows import JoinedWindows
from dlo_tasks.language.tokenization import tokenize_in_processes
from support.curricula_runs import fit, seeded, texts
from support.texts import lines, sentences
from support.token_files import documents, write_megatron
from support.trainers import quiet_trainer

MIX = [{"samples": 0, "weights": {"text": 0.5, "web": 0.5}}, {"samples": 400, "weights": {"text": 0.1, "web": 0.9}}]


@pytest.fixture
def mixed(tmp_path, cache):
    """Makes the datamodule of a text source and a tokenised one."""
    file = lines(tmp_path / "texts.jsonl", *({"text": text} for text in sentences(80)))
    write_megatron(tmp_path / "web", documents(400, 90))

    def made(**options) -> TextData:
        sources = {"text": {"files": str(file)}, "web": {"path": str(tmp_path / "web")}}
        defaults = {"sources": sources, "mix": MIX, "mix_ramp": "linear", "cache_dir": str(cache), "seq_len": 24}
        return TextData(
            **defaults
            | {"batch_size": 8, "vocab_size": 320, "corpus_bytes": 60_000, "val_fraction": 0.1, "epoch_samples": 200}
            | options
        )

    return made


def sources_of(data: TextData, index: np.ndarray) -> np.ndarray:
    dataset = data._datasets["train"]
    assert isinstance(dataset, JoinedWindows)
    return dataset.part_of(index)


def test_batches_mix_the_sources_by_weights_that_change(mixed, capsys):
    data = mixed()
    data.setup("fit")
    loader = data.train_dataloader()
    found = []
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        found += [draw.index for batch in loader.sampler for draw in batch]
    source = sources_of(data, np.array(found))
    assert len(source) == 800
    # linear from 0.5 to 0.1 over 400 samples, then 0.1
    assert (source[:400] == 0).sum() == pytest.approx(0.3 * 400, abs=1)
    assert (source[400:] == 0).sum() == pytest.approx(0.1 * 400, abs=1)
    assert (source[:40] == 0).mean() > 0.4
    said = capsys.readouterr().out
    assert "windows of 24 in 2 sources: text" in said
    batch = next(iter(loader))
    assert {name: tuple(values.shape) for name, values in batch.items()} == {
        "input_ids": (8, 24),
        "labels": (8, 24),
        "position_ids": (8, 24),
        "tokens_in_step": (),
    }


def test_validation_has_windows_that_training_does_not(mixed):
    data = mixed()
    data.setup("fit")
    seen = {row.tobytes() for index in (0, 1) for row in all_rows(data._datasets["train"].parts[index])}
    held = [row.tobytes() for part in data._datasets["val"].parts for row in all_rows(part)]
    assert held
    assert not seen & set(held)
    batches = list(data.val_dataloader())
    assert sum(len(batch["labels"]) for batch in batches) == len(held)


def all_rows(part) -> list:
    from dlo_framework.data import Draw

    return [part.fetch([Draw(index, 0, True)])["input_ids"].numpy() for index in range(len(part))]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("start", [0, 40])
def test_the_targets_of_a_step_are_counted_over_ranks_and_micro_batches(mixed, accumulate, start):
    data = mixed()
    data.setup("fit")
    dataset, order = data._datasets["train"], data.mix_options.order(["text", "web"], [10, 20], 0)
    order = data.train_dataloader().sampler.order
    ranks = [
        TextBatchSampler(
            order.size, batch_size=4, shuffle=True, drop_last=True, rank=rank, world_size=2, order=order,
            count_targets=dataset.count_targets, accumulation=lambda: AccumulationPlan(accumulate, float("inf")),
        )
        for rank in range(2)
    ]  # fmt: skip
    found = list(zip(*(rank.batches_from(start) for rank in ranks), strict=True))
    assert len(found) == (200 - start) // 8
    counted, said = [], []
    for batches in found:
        counted.append(sum(int((dataset.fetch(batch)["labels"] != IGNORE_INDEX).sum()) for batch in batches))
        said.append({batch.tokens_in_step for batch in batches})
    first = start // 8
    for number, totals in enumerate(said, first):
        begin = number - number % accumulate
        if begin >= first:
            assert totals == {sum(counted[begin - first : begin - first + accumulate])}


class Counter(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        import torch

        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list = []

    def training_step(self, batch, batch_idx):
        self.seen += [tuple(row) for row in batch["input_ids"].tolist()]
        return self.weight.sum()

    def configure_optimizers(self):
        import torch

        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_run_resumes_in_mid_epoch_with_other_workers(mixed, tmp_path):
    def fit(steps: int, workers: int, checkpoint: str | None = None) -> tuple[Counter, Trainer]:
        model = Counter()
        trainer = quiet_trainer(
            max_steps=steps, limit_val_batches=0,
            callbacks=[ExactResume()],
        )  # fmt: skip
        trainer.fit(model, datamodule=mixed(num_workers=workers), ckpt_path=checkpoint, weights_only=False)
        return model, trainer

    whole, _ = fit(40, 0)
    first, trainer = fit(31, 2)
    trainer.save_checkpoint(tmp_path / "mid.ckpt")
    rest, _ = fit(40, 1, str(tmp_path / "mid.ckpt"))
    assert whole.seen == first.seen + rest.seen
    assert len(whole.seen) == 320


def consume(options: dict, folder: str, ranks: int, workers: int, lives: float | None = None) -> None:
    """Loads three epochs on some ranks, logs their samples, and commits the position after each batch.

    It kills itself so many seconds after the first batch.
    """
    killer = None if lives is None else threading.Timer(lives, os.kill, (os.getpid(), signal.SIGKILL))
    data = TextData(**options)
    data.setup("fit")
    dataset, order = data._datasets["train"], data.train_dataloader().sampler.order
    loaders = []
    for rank in range(ranks):
        place = {"batch_size": 16 // ranks, "shuffle": True, "drop_last": True, "rank": rank, "world_size": ranks}
        sampler = TextBatchSampler(
            order.size, **place, order=order, count_targets=dataset.count_targets,
            accumulation=lambda: AccumulationPlan(1, float("inf")),
        )  # fmt: skip
        loaders.append(ResumableLoader(dataset, **place, num_workers=workers, batch_sampler=sampler))
    kept = Path(folder, "state")
    state = json.loads(kept.read_text()) if kept.exists() else {"epoch": 0, "samples": 0, "bytes": 0}
    with open(f"{folder}/log", "a") as log:
        log.truncate(state["bytes"])
        for loader in loaders:
            loader.load_state_dict(state)
        while state["epoch"] < 3:
            for loader in loaders:
                loader.sampler.set_epoch(state["epoch"])
            for batches in zip(*loaders, strict=True):
                for batch in batches:
                    log.writelines(f"{row}\n" for row in batch["input_ids"].tolist())
                log.flush()
                state = {**loaders[0].state_dict(), "bytes": os.fstat(log.fileno()).st_size}
                Path(folder, "new").write_text(json.dumps(state))
                os.replace(f"{folder}/new", kept)
                if killer is not None and not killer.is_alive():
                    killer.start()
                time.sleep(0.01)
            state = {"epoch": state["epoch"] + 1, "samples": 0, "bytes": os.fstat(log.fileno()).st_size}


def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path, cache, mixed):
    options = {
        "sources": {"text": {"files": str(tmp_path / "texts.jsonl")}, "web": {"path": str(tmp_path / "web")}},
        "mix": MIX, "mix_ramp": "linear", "shuffle": "buffer", "shuffle_chunk": 8, "shuffle_buffer": 64,
        "cache_dir": str(cache), "seq_len": 24, "batch_size": 16, "vocab_size": 320, "corpus_bytes": 60_000,
        "epoch_samples": 200,
    }  # fmt: skip
    mixed().setup("fit")  # the caches are there: starts are fast
    context = multiprocessing.get_context("fork")

    def run(name: str, ranks: int, workers: int, lives: float | None = None) -> int | None:
        (tmp_path / name).mkdir(exist_ok=True)
        process = context.Process(target=consume, args=(options, str(tmp_path / name), ranks, workers, lives))
        process.start()
        process.join(120)
        return process.exitcode

    assert run("whole", 1, 0) == 0
    generator, kills = random.Random(0), 0
    for ranks, workers in [(1, 0), (2, 1), (4, 0), (8, 0)]:
        kills += run("killed", ranks, workers, generator.uniform(0.0, 0.05)) == -signal.SIGKILL
    assert kills >= 2
    assert run("killed", 2, 0) == 0
    found = {name: (tmp_path / name / "log").read_text().splitlines() for name in ("whole", "killed")}
    assert len(found["whole"]) == 3 * (200 // 16 * 16)
    assert found["killed"] == found["whole"]


def test_processes_tokenise_as_one_does(tmp_path, make):
    texts = sentences(1500)
    one, many = (
        make(texts, cache_dir=str(tmp_path / f"cache{n}"), tokenize_processes=n, tokenizer=None) for n in (1, 3)
    )
    stores = []
    for data in (one, many):
        data.prepare_data()
        stores.append(TokenStore(data.cache_dir / data._names["train"]))
    assert len(stores[0]) == 1500
    assert all(
        np.array_equal(getattr(stores[0], name), getattr(stores[1], name)) for name in ("bounds", "hashes", "rows")
    )
    assert np.array_equal(stores[0].read(slice(None))[0], stores[1].read(slice(None))[0])


def _pids(records):
    time.sleep(0.01)  # Else one process may do all before the others have run.
    return [os.getpid()] * len(records)


def _killed(records):
    os.kill(os.getpid(), signal.SIGKILL)


def _refuses(records):
    raise DloError("the third record is broken")


def test_several_processes_work_and_their_errors_arrive():
    assert set(tokenize_in_processes(range(1000), _pids, None, 1000)) == {os.getpid()}
    pids = set(tokenize_in_processes(range(20_000), _pids, 3, 0))
    assert os.getpid() not in pids
    assert len(pids) > 1
    with pytest.raises(DloError, match="the third record is broken"):
        list(tokenize_in_processes(range(2000), _refuses, 2, 0))
    with pytest.raises(DloError, match="3 processes must tokenise to the end, got one that was killed"):
        list(tokenize_in_processes(range(2000), _killed, 3, 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix": {"text": 0, "web": 1}}, "mix.text must be positive, got 0"),
        ({"mix": {"text": 1, "wbe": 1}}, "mix must name sources, got 'wbe'; did you mean 'web'"),
        ({"sources": {"a": "x"}, "mix": None}, "sources.a must be an object with files or path, got 'x'"),
        ({"sources": {"a": {"file": "x"}}, "mix": None}, "got 'file'; did you mean 'files'"),
        ({"sources": {"a": {}}, "mix": None}, "sources.a must have either files, for text, or path"),
        ({"sources": {"a": {"files": "x", "column": "npy"}}, "mix": None}, "sources.a.column must not be set for text"),
        ({"sources": {"a": {"path": "x", "format": "megaton"}}, "mix": None}, "did you mean 'megatron'"),
        (
            {"sources": {"a": {"path": "x", "format": "mds"}}, "mix": None},
            "got 'mds'; removed in 0.2: write the shards",
        ),
        ({"packing": "none"}, "packing must be best_fit with sources, got none"),
        ({"train_files": "x"}, "train_files must not be set with sources, got x"),
        ({"sources": None}, "must be set with sources, got no sources"),
        ({"epoch_samples": 0}, "epoch_samples must be at least 1, got 0"),
        ({"tokenize_processes": 0}, "tokenize_processes must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused_at_once(mixed, options, message):
    with pytest.raises(DloError) as error:
        mixed(**options)
    assert message in str(error.value)


def test_missing_files_are_refused_before_the_run(mixed, tmp_path):
    data = mixed(sources={"text": {"files": str(tmp_path / "texts.jsnl")}, "web": {"path": str(tmp_path / "web")}})
    with pytest.raises(DloError, match=r"sources.text.files must name files, got .*texts.jsnl"):
        data.check()
    data = mixed(sources={"text": {"files": str(tmp_path / "texts.jsonl")}, "web": {"path": str(tmp_path / "wed")}})
    with pytest.raises(DloError, match=r"sources.web.path must name files, got .*wed, which does not exist"):
        data.check()
    small = mixed(vocab_size=300)
    write_megatron(tmp_path / "web", documents(400, 90, vocab=5000))
    with pytest.raises(DloError, match=r"sources.web: token ids must be below the tokenizer's vocabulary size"):
        small.setup("fit")


def test_the_standard_library_is_a_source(mixed, cache):
    data = mixed(sources={"json": {"files": "stdlib://json/*.py"}}, mix=None, epoch_samples=None, val_fraction=0.0)
    data.check()
    data.setup("fit")
    assert data.statistics["train"].samples == len(data.train_dataloader().dataset) > 100


# A mixture of tokenised shards: two ranks train as one process, and runs resume on other ranks and workers


CHANGING = [{"samples": 0, "weights": {"own": 0.8, "web": 0.2}}, {"samples": 60, "weights": {"own": 0.3, "web": 0.7}}]
#: Batches of 8 samples in an epoch, and where the run stops: in the middle of the first and the second epoch.
EPOCH, STOPS = 7, (3, 9, 14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of dlo's own format and of Megatron-LM's, and the tokenizer's cache."""
    folder = tmp_path_factory.mktemp("mixture")
    own = documents(150, 90, seed=1)
    learned = (Document(ids, np.ones(len(ids), bool), number, 0, number) for number, ids in enumerate(own))
    write_store(folder / "tokens-own.bin", learned, 320)
    write_megatron(folder / "web", documents(200, 90, seed=2))
    mixture(folder)[1].prepare_data()
    return folder


def mixture(folder: Path, **options: Any) -> tuple[CausalLM, TextData]:
    sources = {"own": {"path": str(folder / "tokens-own.bin")}, "web": {"path": str(folder / "web")}}
    data = {
        "train_files": None,
        "sources": sources,
        "mix": CHANGING,
        "mix_ramp": "linear",
        "epoch_samples": EPOCH * 8,
        **options,
    }
    return texts(folder, data=data)


def in_batches(folder: Path, accumulate: int) -> tuple[CausalLM, TextData]:
    return mixture(folder, num_workers=accumulate - 1)


@pytest.mark.slow
def test_two_ranks_train_on_a_mixture_as_one_process_does(folder: Path) -> None:
    zero3, tp = partial(ZeroStrategy, 3), partial(MeshStrategy, tp=2)
    cases = [
        Case(
            strategy,
            {"folder": folder, "accumulate": accumulate},
            {"precision": "64-true", "accumulate_grad_batches": accumulate},
            name=f"{strategy}, {accumulate}",
        )
        for strategy, accumulate in (("ddp", 1), (zero3, 1), (tp, 1), (zero3, 2))
    ]
    for comparison in assert_parity(in_batches, cases, steps=9, rtol=1e-9):
        assert comparison.comparable


class Seen(Callback):
    """Samples that this rank has trained on."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[int, ...]]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append([tuple(row) for row in batch["input_ids"].tolist()])


def _train(
    folder: Path, own: Path, strategy: str, ranks: int, steps: int, workers: int, before: Path | None
) -> tuple[list[float], list[list[tuple[int, ...]]]]:
    seeded()
    own.mkdir(exist_ok=True)
    seen = Seen()
    losses, _ = fit(
        own, mixture(folder, num_workers=workers), strategy, ranks, [seen],
        epochs=2, batches=EPOCH, max_steps=steps, ckpt_path=before, precision="64-true",
    )  # fmt: skip
    return losses, seen.rows


def _links(rank: int, world_size: int, folder: Path, own: Path) -> list[Any]:
    """Trains on one process, goes on with two ranks, and ends on one process; beside it the run of one process."""
    first, second, third = STOPS
    found: list[Any] = [None, None]
    if rank == 0:
        found[0] = _train(folder, own / "alone", "auto", 1, third, 0, None)
        found[1] = _train(folder, own / "1", "auto", 1, first, 2, None)
    found.append(_train(folder, own / "2", "zero3", 2, second, 1, own / "1" / "last.ckpt"))
    leave_group()
    if rank == 0:
        found.append(_train(folder, own / "3", "auto", 1, third, 3, own / "2" / "last.ckpt"))
    return found


@pytest.mark.timeout(300)
def test_a_run_resumes_in_mid_epoch_on_other_ranks_and_workers(folder: Path, tmp_path: Path) -> None:
    main, other = run_distributed(_links, 2, folder, tmp_path, timeout=250, backend=None)
    (losses, whole), *links = main
    assert [len(link[1]) for link in links] == [STOPS[0], STOPS[1] - STOPS[0], STOPS[2] - STOPS[1]]
    links[1] = links[1][0], [mine + others for mine, others in zip(links[1][1], other[2][1], strict=True)]
    assert [rows for link in links for rows in link[1]] == whole
    assert len({row for rows in whole for row in rows}) > 0.9 * sum(map(len, whole))
    assert [loss for link in links for loss in link[0]] == pytest.approx(losses, rel=1e-9)
