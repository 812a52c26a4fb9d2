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
from support.curricula_runs import apart, fit, images, refusal, saved_state, seeded, texts

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
            {"accumulate_grad_batches": 2},
        ),
    },
}


def _runs(rank: int, world_size: int, folder: Path, strategies: dict[str, str]) -> tuple[dict[str, list[float]], str]:
    """Returns losses by cell, and what a strategy that cannot drop tokens is refused with."""
    found = {}
    for kind, strategy in strategies.items():
        for name, (callbacks, options) in CELLS[kind].items():
            home = folder / f"{kind} {name} {strategy}"
            home.mkdir(exist_ok=True)
            seeded()
            made = images() if kind == "images" else texts(folder)
            found[name], _ = fit(home, made, strategy, world_size, callbacks(), **options)
    if world_size == 1:
        return found, ""
    return found, refusal(lambda: fit(folder, texts(folder), "sp", world_size, [TokenDrop(0.3)], check=False))


@pytest.mark.timeout(600)
def test_two_ranks_are_one_process(folder: Path) -> None:
    alone, _ = _runs(0, 1, folder, dict.fromkeys(CELLS, "auto"))
    strategies = {"images": "pp", "texts": "zero3"}
    ranks = run_distributed(_runs, 2, folder, strategies, timeout=600)
    for losses, refused in ranks:
        assert losses == {name: pytest.approx(expected, rel=2e-5) for name, expected in alone.items()}
        assert "TokenDrop does not support sequence_parallel: true" in refused
    for kind, name in [("images", "all"), ("texts", "LayerDrop"), ("texts", "SequenceLength")]:
        assert alone[name][-1] != alone[name][0]
        ways = ("auto", strategies[kind])
        one, two = (saved_state(folder / f"{kind} {name} {way}" / "last.ckpt") for way in ways)
        wrong = {
            key: value
            for key, value in apart(one, two).items()
            if value > (1e-3 if key.startswith("optimizer") else 2e-4)
        }
        assert not wrong, name
