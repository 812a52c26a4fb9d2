"""A mixture of tokenised shards: two ranks train as one process, and runs resume on other ranks and workers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback

from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.training import leave_group
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.text_data import TextData
from dlo_tasks.language.token_cache import Document, write_store
from support.curricula_runs import fit, seeded, texts
from support.token_files import documents, write_megatron

MIX = [{"samples": 0, "weights": {"own": 0.8, "web": 0.2}}, {"samples": 60, "weights": {"own": 0.3, "web": 0.7}}]
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
        "mix": MIX,
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
