"""Optimizer steps without a backward before them: weights stay, and the next step is an ordinary one."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import gather_full_weights
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_tasks.imagenet.classifier import ImageClassifier
from support.fsdp_nets import Batches, differ, trainer
from support.optimizer_runs import STEPS, STRATEGIES, data, plain_loop, task

SKIPPED = 1


class Skipping(ImageClassifier):
    """Steps by itself: Lightning refuses a `training_step` that returns None on several ranks."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        if batch_idx != SKIPPED:
            self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()
        optimizer.zero_grad()


class Returning(ImageClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == SKIPPED else super().training_step(batch, batch_idx)


def _differences(rank: int, world: int, kind: type[ImageClassifier]) -> dict[str, Any]:
    silence_lightning()
    found: dict[str, Any] = {}
    for name in ("lamb8bit", "adamw"):  # Of full tensors, and elementwise.
        for strategy in ("zero1", "zero3", "fsdp", *(["tp"] if world == 2 else [])):
            share = (0, 1) if strategy == "tp" else (rank, world)
            batches = Batches([tuple(part.chunk(share[1])[share[0]] for part in batch) for batch in data()])
            run = trainer(world, STRATEGIES[strategy](), max_steps=STEPS, max_epochs=1)
            try:
                run.fit(task(name, kind), batches)
                weights = {key: value for key, value in gather_full_weights(run).items() if key.startswith("model.")}
                if rank == 0:
                    found[f"{name} {strategy}"] = differ(weights, plain_loop(name, share[1], SKIPPED))
            except Exception:
                found[f"{name} {strategy}"] = traceback.format_exc()
    leave_group()
    return found


@pytest.mark.parametrize(("kind", "ranks"), [(Skipping, 2), (Returning, 1)])
def test_a_step_without_a_backward_changes_nothing(kind: type[ImageClassifier], ranks: int) -> None:
    found = run_distributed(_differences, ranks, kind, timeout=200)[0]
    raised = [value for value in found.values() if isinstance(value, str)]
    assert not raised, raised[0]
    assert len(found) == (8 if ranks == 2 else 6)
    for name, difference in found.items():
        assert difference <= (5e-3 if name.endswith("tp") else 0.0), name
