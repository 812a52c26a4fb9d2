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

#: Callbacks by name, and options of the trainer.
IMAGES: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "LayerDrop": (lambda: [LayerDrop(theta=0.3, rate=5, seed=1)], {"accumulate_grad_batches": 2, "batches": 8}),
    "TokenDrop": (lambda: [TokenDrop(0.3, multiple=1)], {"accumulate_grad_batches": 2, "batches": 8}),
    # Under tp, single precision's rounding moves weights by 5e-4 of their norm; in double precision by 4e-14.
    "all": (
        lambda: [LayerDrop(rate=5), TokenDrop(0.3, multiple=1), Freeze("unfreeze", every="10%")],
        {"precision": "64-true"},
    ),
    "Freeze": (lambda: [Freeze(t0=0.5)], {"gradient_clip_val": 0.5}),
    "Freeze, unfreeze": (lambda: [Freeze("unfreeze", every="10%", lr_decay=1.5)], {"accumulate_grad_batches": 2}),
}
TEXTS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "LayerDrop": (lambda: [LayerDrop(theta=0.3, rate=5, seed=1)], {"gradient_clip_val": 0.3}),
    "Freeze": (lambda: [Freeze(t0=0.5)], {"gradient_clip_val": 0.5}),
    "Freeze, unfreeze": (lambda: [Freeze("unfreeze", every="10%", lr_decay=1.5)], {}),
    "TokenDrop": (lambda: [TokenDrop(0.3)], {"gradient_clip_val": 0.5}),
    "SequenceLength": (
        lambda: [SequenceLength(lengths={0: [8, 16], "60%": 32})],
        {"accumulate_grad_batches": 2, "batches": 8},
    ),
    "SequenceLength, truncate": (lambda: [SequenceLength(8, "80%", method="truncate")], {}),
}
#: What runs each time: each callback under one strategy; the slow tests have all.
SOME = {"images": ["all"], "texts": ["LayerDrop", "SequenceLength"]}
#: Cells that a strategy refuses: `dlo fit` says so before processes start.
REFUSED: dict[tuple[str, str], str] = {
    ("TokenDrop", "cp"): "TokenDrop does not support cp 2",
    ("TokenDrop", "sp"): "TokenDrop does not support sequence_parallel: true",
    ("all", "sp"): "TokenDrop does not support sequence_parallel: true",
}


def _refused(rank: int, world_size: int, folder: Path) -> str:
    return refusal(lambda: fit(folder, texts(folder), "sp", world_size, [TokenDrop(0.3)], check=False))


@pytest.mark.timeout(300)
def test_what_a_strategy_cannot_do_is_refused(folder):
    for message in run_distributed(_refused, 2, folder, timeout=200):
        assert REFUSED["TokenDrop", "sp"] in message


def _runs(
    rank: int, world_size: int, folder: Path, strategy: str, kind: str, names: list[str]
) -> dict[str, list[float]]:
    found = {}
    for name in names:
        callbacks, options = (IMAGES if kind == "images" else TEXTS)[name]
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


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, list[float]]]:
    """Losses of one process by kind; filled as they are asked for."""
    return {"images": {}, "texts": {}}


def compare(folder: Path, alone: dict[str, Any], strategy: str, kind: str, names: list[str]) -> None:
    names = [name for name in names if (name, strategy) not in REFUSED]
    if new := [name for name in names if name not in alone[kind]]:
        alone[kind] |= run_distributed(_runs, 1, folder, "auto", kind, new, backend=None, timeout=300)[0]
    ranks = run_distributed(_runs, 2, folder, strategy, kind, names, timeout=600)
    for name in names:
        expected = alone[kind][name]
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("strategy", "kind"), [("pp", "images"), ("zero3", "texts")])
def test_two_ranks_are_one_process(folder, alone, strategy, kind):
    compare(folder, alone, strategy, kind, SOME[kind])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["images", "texts"])
@pytest.mark.parametrize("strategy", ["zero3", "zero3_offload", "fsdp", "tp", "sp", "pp", "zero bubble", "cp"])
def test_every_strategy(folder, alone, strategy, kind):
    """The other strategies have each callback in tests/composition."""
    if (strategy, kind) == ("cp", "images"):
        pytest.skip("cp refuses vision transformers")
    compare(folder, alone, strategy, kind, [*(IMAGES if kind == "images" else TEXTS)])
