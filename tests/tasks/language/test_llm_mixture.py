"""TextData of several sources: proportions, exact resume on other ranks, processes that tokenise, refusals."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback

from dlo_framework.data import Draw
from dlo_framework.errors import DloError
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.training import leave_group
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.token_cache import Document, TokenStore, write_store
from dlo_tasks.language.token_windows import JoinedWindows
from dlo_tasks.language.tokenization import tokenize_in_processes
from support.curricula_runs import fit, seeded, texts
from support.texts import lines, sentences
from support.token_files import documents, write_megatron

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
    assert "windows of 24 in 2 sources: text" in capsys.readouterr().out


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
    return [part.fetch([Draw(index, 0, True)])["input_ids"].numpy() for index in range(len(part))]


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


def test_missing_files_are_refused_before_the_run(mixed, tmp_path):
    data = mixed(sources={"text": {"files": str(tmp_path / "texts.jsnl")}, "web": {"path": str(tmp_path / "web")}})
    with pytest.raises(DloError, match=r"sources.text.files must name files, got .*texts.jsnl"):
        data.check()
    data = mixed(sources={"text": {"files": str(tmp_path / "texts.jsonl")}, "web": {"path": str(tmp_path / "wed")}})
    with pytest.raises(DloError, match=r"sources.web.path must name files, got .*wed, which does not exist"):
        data.check()


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
        "shuffle": "buffer",
        "shuffle_chunk": 8,
        "shuffle_buffer": 64,
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
