"""Schedules of what is trained: two ranks have the losses, weights and optimizer state of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlo_framework.testing import run_distributed
from dlo_plugins.curriculum.freeze import Freeze
from dlo_plugins.curriculum.layer_drop import LayerDrop
from dlo_plugins.curriculum.sequence_length import SequenceLength
from dlo_plugins.curriculum.token_drop import TokenDrop
from support.curricula_runs import apart, fit, images, prepare_texts, refusal, saved_state, seeded, texts

#: By kind of model, callbacks by name, with options of the trainer; tests/composition has each under each strategy.
CELLS: dict[str, dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]]] = {
    # Under tp, single precision's rounding moves weights by 5e-4 of their norm; in double precision by 4e-14.
    "images": {
        "all": (
            lambda: [LayerDrop(rate=5), TokenDrop(0.3, multiple=1), Freeze("unfreeze", every="10%")],
            {"precision": "64-true"},
        ),
    },
    "texts": {
        "LayerDrop": (lambda: [LayerDrop(theta=0.3, rate=5, seed=1)], {"gradient_clip_val": 0.3}),
        "SequenceLength": (
            lambda: [SequenceLength(lengths={0: [8, 16], "60%": 32})],
            {"accumulate_grad_batches": 2, "batches": 8},
        ),
    },
}


def _refused(rank: int, world_size: int, folder: Path) -> str:
    return refusal(lambda: fit(folder, texts(folder), "sp", world_size, [TokenDrop(0.3)], check=False))


@pytest.mark.timeout(300)
def test_what_a_strategy_cannot_do_is_refused(folder):
    for message in run_distributed(_refused, 2, folder, timeout=200):
        assert "TokenDrop does not support sequence_parallel: true" in message


def _runs(rank: int, world_size: int, folder: Path, strategy: str, kind: str) -> dict[str, list[float]]:
    found = {}
    for name, (callbacks, options) in CELLS[kind].items():
        home = folder / f"{kind} {name} {strategy}"
        home.mkdir(exist_ok=True)
        seeded()
        made = images() if kind == "images" else texts(folder)
        found[name], _ = fit(home, made, strategy, world_size, callbacks(), **options)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("curricula")
    prepare_texts(home)
    return home


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("strategy", "kind"), [("pp", "images"), ("zero3", "texts")])
def test_two_ranks_are_one_process(folder, strategy, kind):
    (alone,) = run_distributed(_runs, 1, folder, "auto", kind, backend=None, timeout=300)
    ranks = run_distributed(_runs, 2, folder, strategy, kind, timeout=600)
    for name, expected in alone.items():
        for rank in ranks:
            assert rank[name] == pytest.approx(expected, rel=2e-5), (name, strategy)
        assert expected[-1] != expected[0]
        one, two = (saved_state(folder / f"{kind} {name} {way}" / "last.ckpt") for way in ("auto", strategy))
        wrong = {
            key: value
            for key, value in apart(one, two).items()
            if value > (1e-3 if key.startswith("optimizer") else 2e-4)
        }
        assert not wrong, (name, strategy)
