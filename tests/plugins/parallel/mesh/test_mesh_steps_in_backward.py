"""OptimizerInBackward on meshes: the weights of the ordinary step, with tp, cp, experts and shards of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from dlo_framework.models.experts import MixtureOptions
from dlo_framework.strategy_contract import contract_of
from dlo_framework.testing import run_distributed
from dlo_plugins.memory.optimizer_in_backward import OptimizerInBackward
from support.curricula_runs import apart, fit, prepare_texts, refusal, saved_state, seeded, texts

EXPERTS: dict[str, Any] = {"experts": MixtureOptions(count=4, aux_loss=0.01, z_loss=0.01)}
#: LAMB needs full tensors, and counts its steps in the parameter groups.
LAMB: dict[str, Any] = {"optimizer": "lamb", "optimizer_args": {"max_grad_norm": None}}


class Peak(Callback):
    """Largest number of bytes of this rank's gradients, looked at whenever one arrives."""

    def __init__(self) -> None:
        self.bytes = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        contract = contract_of(trainer.strategy)

        def look(*_: Any) -> None:
            held = contract.state_bytes()
            assert held is not None
            self.bytes = max(self.bytes, held["gradients"])

        for parameter in pl_module.parameters():
            parameter.register_post_accumulate_grad_hook(look)


def _compare(rank: int, world: int, folder: Path, cells: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy, options in cells:
        peaks, homes = [], []
        for stepping in ([], [OptimizerInBackward()]):
            homes.append(folder / f"{strategy} {len(options)} {len(stepping)}")
            homes[-1].mkdir(exist_ok=True)
            seeded()
            peak = Peak()
            losses, _ = fit(
                *(homes[-1], texts(folder, **options), strategy, world, [peak, *stepping]),
                precision="64-true",
                epochs=1,
                batches=3,
            )
            peaks.append(peak.bytes)
        steps = stepping[0].steps
        difference = apart(*(saved_state(home / "last.ckpt") for home in homes)) if rank == 0 else {}
        found[f"{strategy} {len(options)}"] = steps, losses, peaks, max(difference.values(), default=0.0)
    if world == 2:
        found["pp"] = refusal(
            lambda: fit(folder, texts(folder), "pp", world, [OptimizerInBackward()], batches=1, check=False)
        )
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("world", "cells"),
    [
        (2, [("sp", {}), ("ep", EXPERTS | LAMB)]),
        pytest.param(
            4,
            [
                ("shard x sp", {}),
                ("cp x tp", {}),
                ("copies x shard", {}),
                ("ep x tp", EXPERTS),
                ("shard x sp", LAMB),
                ("copies x shard", LAMB),
                ("ep x tp", EXPERTS | LAMB),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two ranks", "four ranks"],
)
def test_a_mesh_has_the_weights_of_the_ordinary_step(tmp_path: Path, world: int, cells: list[Any]) -> None:
    prepare_texts(tmp_path)
    ranks = run_distributed(_compare, world, tmp_path, cells, timeout=350)
    for found in ranks:
        if world == 2:
            assert "pp=2 adds up the gradients of micro-batches" in found.pop("pp")
        assert len(found) == len(cells)
        for name, (steps, losses, (plain, peak), _) in found.items():
            # Full tensors are stepped by unit: a rank owns tensors of four to six of the six.
            assert steps >= 3 * 4, name
            assert losses[-1] != losses[0], name
            assert peak < 0.7 * plain, (name, peak, plain)
    for name, (_, _, _, difference) in ranks[0].items():
        # Sums over four ranks of tp take another order where they are sent one by one.
        assert difference == 0.0 if world == 2 else difference < 1e-12, name
