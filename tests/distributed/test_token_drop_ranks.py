"""TokenDrop where ranks share sequences: losses, weights and optimizer state are those of one process.

Runs are in double precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_plugins.callbacks.freeze import Freeze
from dlo_plugins.callbacks.token_drop import TokenDrop
from support.curricula_runs import apart, fit, images, prepare_texts, saved_state, seeded, texts

#: Data and models. Rows of 30 tokens are padded to a multiple of four, and so are the tokens that blocks see.
MADE: dict[str, Any] = {
    "texts": lambda folder: texts(folder, data={"seq_len": 30}),
    "windows": lambda folder: texts(folder, config={"model_type": "mistral", "sliding_window": 7}),
    "images": lambda folder: images(),
}
#: Callbacks beside; blocks that are frozen have no backward in which a block's state could be left.
BESIDE: dict[str, Any] = {"windows": lambda: [Freeze("unfreeze", every="10%")]}
#: Strategies on two and on four ranks, with what they train.
TWO = [("cp recomputed", "texts"), ("sp recomputed", "texts")]
MORE = [
    *((strategy, "texts") for strategy in ("cp", "ulysses", "sp", "cp compiled", "cp gathered", "Varuna")),
    *((strategy, "windows") for strategy in ("cp recomputed", "ulysses", "sp recomputed")),
    ("sp", "images"),
]
FOUR = [
    (strategy, "texts")
    for strategy in ("cp of four", "cp x shard", "cp x tp", "cp x sp", "ulysses x sp", "cp x pp", "sp x pp")
]


def _runs(rank: int, world_size: int, folder: Path, cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[float]]:
    silence_lightning()
    found = {}
    for strategy, kind in cases:
        home = folder / f"{kind} {strategy}"
        home.mkdir(exist_ok=True)
        seeded()
        callbacks = [TokenDrop(0.3, multiple=1), *BESIDE.get(kind, list)()]
        losses, _ = fit(home, MADE[kind](folder), strategy, world_size, callbacks, precision="64-true")
        found[strategy, kind] = losses
    leave_group()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tokens")
    prepare_texts(home)
    return home


def compare(folder: Path, ranks: int, cases: list[tuple[str, str]]) -> None:
    single = [("auto", kind) for kind in dict.fromkeys(kind for _, kind in cases)]
    (alone,) = run_distributed(_runs, 1, folder, single, backend=None, timeout=200)
    for found in run_distributed(_runs, ranks, folder, cases, timeout=500):
        for strategy, kind in cases:
            # A pipeline adds losses in single precision.
            assert found[strategy, kind] == pytest.approx(alone["auto", kind], rel=2e-7), (strategy, kind)
    for strategy, kind in cases:
        one, other = (saved_state(folder / f"{kind} {way}" / "last.ckpt") for way in ("auto", strategy))
        assert max(apart(one, other).values(), default=0) < 1e-11, (strategy, kind)


@pytest.mark.timeout(300)
def test_ranks_that_share_sequences_drop_the_tokens_of_one_process(folder: Path) -> None:
    compare(folder, 2, TWO)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_methods_windows_and_compiled_blocks(folder: Path) -> None:
    compare(folder, 2, MORE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pairs_of_axes_on_four_ranks(folder: Path) -> None:
    compare(folder, 4, FOUR)
