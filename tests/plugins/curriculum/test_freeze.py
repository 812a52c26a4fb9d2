"""Freezing from below and unfreezing from above in one process: as a loop by hand that sets requires_grad."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.curriculum.freeze import Freeze, FreezeOutSchedule, UnfreezeSchedule
from support.curricula_runs import assert_refused, check_resume, fit, images, seeded


def test_units_are_frozen_from_below_as_in_the_paper():
    schedule = FreezeOutSchedule(3, 0.5, cubic=True, scale_lr=False)
    assert schedule.ends == pytest.approx([0.125, 0.75**3, 1])
    assert [schedule.frozen(at) for at in (0, 0.124, 0.125, 0.42, 0.5, 1)] == [0, 0, 1, 1, 2, 2]
    assert schedule.factors(0.0625)[0] == pytest.approx(0.5)
    assert schedule.factors(0.5)[2] == pytest.approx(0.5)
    assert schedule.factors(0.5)[0] == 0
    scaled = FreezeOutSchedule(3, 0.5, cubic=False, scale_lr=True)
    assert scaled.factors(0) == pytest.approx([2, 1 / 0.75, 1])


def test_units_are_unfrozen_from_above():
    schedule = UnfreezeSchedule(4, 0.1, 2.0)
    assert [schedule.frozen(at) for at in (0, 0.0999, 0.1, 0.2, 0.3, 0.31, 1)] == [3, 3, 2, 1, 0, 0, 0]
    assert schedule.factors(0.5) == [0.125, 0.25, 0.5, 1]


class ByHand(Callback):
    """Losses and weights of a loop that freezes with requires_grad, on the same batches."""

    def __init__(self, schedule: Any, clip: float | None) -> None:
        self.schedule, self.clip = schedule, clip
        self.losses: list[float] = []
        self.counts: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.model = copy.deepcopy(pl_module.model)
        model = self.model
        head = [*model.norm.parameters(), *model.fc_norm.parameters(), *model.head.parameters()]
        blocks = [list(block.parameters()) for block in model.blocks]
        known = {id(p) for part in (head, *blocks) for p in part}
        self.units = [[p for p in model.parameters() if id(p) not in known], *blocks, head]
        decays = [p for p in model.parameters() if p.ndim > 1 and p is not model.pos_embed and p is not model.cls_token]
        self.decayed = {id(p) for p in decays}
        self.optimizer: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        steps = trainer.num_training_batches * trainer.max_epochs
        fraction = (trainer.global_step - 1) / steps
        frozen, factors = self.schedule.frozen(fraction), self.schedule.factors(fraction)
        self.counts.append(frozen)
        for number, unit in enumerate(self.units):
            for parameter in unit:
                parameter.requires_grad_(number >= frozen)
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(
                [
                    {"params": [p], "weight_decay": 0.05 if id(p) in self.decayed else 0.0, "unit": number}
                    for number, unit in enumerate(self.units)
                    for p in unit
                ],
                lr=1e-2,
                eps=1e-4,
            )
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * factors[group["unit"]]
        self.optimizer.zero_grad(set_to_none=True)
        images_, labels = batch[0], batch[1]
        loss = nn.functional.cross_entropy(self.model.train()(images_), labels)
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.losses.append(float(loss))


CASES = {
    "freeze_out": (lambda: Freeze(t0=0.5), FreezeOutSchedule(6, 0.5, True, True)),
    "unfreeze": (lambda: Freeze("unfreeze", every="10%", lr_decay=1.5), UnfreezeSchedule(6, 0.1, 1.5)),
}


@pytest.mark.parametrize(("name", "clip"), [("freeze_out", 0.5), ("unfreeze", None)])
def test_it_is_a_loop_by_hand(tmp_path, name, clip):
    make, schedule = CASES[name]
    seeded()
    hand = ByHand(schedule, clip)
    task, data = images(weight_decay=0.05)
    losses, trainer = fit(tmp_path, (task, data), "auto", 1, [make(), hand], batches=8, gradient_clip_val=clip)
    assert len(set(hand.counts)) > 3
    assert losses == pytest.approx(hand.losses, rel=1e-5)
    expected = dict(hand.model.named_parameters())
    for key, value in task.model.named_parameters():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)
    # The state of a unit that trained later, or no more, has that many steps.
    steps = {id(p): int(hand.optimizer.state[p]["step"]) for p in hand.model.parameters() if p in hand.optimizer.state}
    own = trainer.optimizers[0].state
    for key, value in task.model.named_parameters():
        assert (int(own[value]["step"]) if value in own else None) == steps.get(id(expected[key]))


def test_a_frozen_block_has_no_graph(tmp_path):
    """What backward goes through: the blocks above the frozen ones alone."""
    seen: list[list[int]] = []

    class Watch(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for number, block in enumerate(pl_module.model.blocks):
                block.attn.qkv.register_full_backward_hook(lambda *_, number=number: seen[-1].append(number))

        def on_train_batch_start(self, *_: Any) -> None:
            seen.append([])

    freeze = Freeze("unfreeze", every="10%")
    fit(tmp_path, images(), "auto", 1, [freeze, Watch()], batches=5)
    assert [sorted(step) for step in seen[:6]] == [[], [3], [2, 3], [1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("name", ["freeze_out", pytest.param("unfreeze", marks=pytest.mark.slow)])
def test_a_run_resumes_in_the_middle(tmp_path: Path, name: str):
    check_resume(tmp_path, CASES[name][0], images, batches=8, accumulate_grad_batches=2)


def test_runs_that_do_not_fit_are_refused(tmp_path):
    compressed = GradientCompression("one_bit")
    assert_refused("GradientCompression must not have method one_bit", tmp_path, images(), Freeze(), compressed)
    every = Freeze("unfreeze", every="1 epochs")
    message = "Freeze: trainer.max_epochs must be set for every in epochs"
    assert_refused(message, tmp_path, images(), every, epochs=-1, max_steps=4)
