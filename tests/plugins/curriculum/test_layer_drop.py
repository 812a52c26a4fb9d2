"""Progressive layer drop in one process: the paper's probabilities, exact gradients, the same draws after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from dlo_framework.testing.record import Recorder
from dlo_plugins.compile.callback import Compile
from dlo_plugins.curriculum.block_schedule import handle_calls
from dlo_plugins.curriculum.layer_drop import (
    LayerDrop,
    StochasticDepthSchedule,
    depth_factor,
    keep_probabilities,
    progressive_theta,
)
from dlo_plugins.memory.rotor_callback import Rotor
from support.curricula_runs import assert_refused, check_resume, fit, images, seeded


def test_theta_and_the_keep_probabilities_are_the_papers():
    assert progressive_theta(0, 0.5, 100) == 1
    assert progressive_theta(0.01, 0.5, 100) == pytest.approx(0.5 * math.exp(-1) + 0.5)
    assert progressive_theta(1, 0.5, 100) == pytest.approx(0.5)
    # Algorithm 1: p starts at 1, and falls by (1 - theta) / L after each layer.
    assert keep_probabilities(0.5, 4) == pytest.approx([1, 0.875, 0.75, 0.625])


class Kept(Callback):
    """What LayerDrop drew for each step, and the gradients of each block."""

    def __init__(self, drop: LayerDrop) -> None:
        self.drop, self.kept, self.used = drop, [], []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.kept.append(list(self.drop._kept))
        blocks = pl_module.model.blocks
        self.used.append([any(bool(p.grad.any()) for p in block.parameters()) for block in blocks])
        assert all(p.grad is not None for p in pl_module.parameters())


def test_blocks_that_are_left_out_have_no_gradient(tmp_path):
    drop = LayerDrop(theta=0.2, rate=20, seed=5)
    kept = Kept(drop)
    seeded()
    fit(tmp_path, images(), "auto", 1, [drop, kept], batches=8)
    assert kept.used == kept.kept
    assert kept.kept[0] == [True] * 4
    assert sum(map(sum, kept.kept)) < 0.9 * 4 * len(kept.kept)


def test_the_output_is_that_of_the_formula(tmp_path):
    """A net of two blocks: x + f1(x), and either x or x + f2(x) / p."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layer(x)

    drop = LayerDrop(theta=0.5)
    block = Block()
    drop._probabilities, drop._kept = [1.0, 0.75], [True, True]
    remove = handle_calls(block, drop.handler(1, "1", block), 20)
    x = torch.randn(2, 3, requires_grad=True)
    torch.testing.assert_close(block(x), x + block.layer(x) / 0.75)
    drop._kept = [True, False]
    out = block(x)
    torch.testing.assert_close(out, x)
    out.sum().backward()
    assert block.layer.weight.grad is not None
    assert not block.layer.weight.grad.any()
    torch.testing.assert_close(x.grad, torch.ones_like(x))
    block.eval()
    torch.testing.assert_close(block(x), x + block.layer(x))
    remove()
    assert type(block) is Block
    assert "_dlo_block_chain" not in block.__dict__


def test_a_resume_in_the_middle_of_a_step_draws_the_same(tmp_path: Path):
    make = lambda: LayerDrop(theta=0.2, rate=20, seed=5)
    check_resume(tmp_path, make, images, batches=8, accumulate_grad_batches=2)


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda: [LayerDrop(skip=["blocks.7"])], "each pattern of skip must match a block, got 'blocks.7'"),
        (lambda: [LayerDrop(skip=["blocks.*"])], "skip must leave at least one block"),
        (lambda: [LayerDrop(), Rotor()], "Rotor must be left out"),
        (lambda: [LayerDrop(), Compile(scope="model")], "Compile must have scope: blocks"),
        (lambda: [StochasticDepthSchedule()], "must have stochastic depth, got ImageClassifier without"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(tmp_path, callbacks, message):
    for check in (True, False):
        assert_refused(message, tmp_path, images(), *callbacks(), check=check)


def test_a_block_that_changes_the_shape_is_refused(tmp_path):
    task, data = images()
    task = type(task)("resnet18", num_classes=10, log_images=0, schedule="constant")
    assert_refused("skip: ['layer2.0']", tmp_path, (task, data), LayerDrop())


def test_stochastic_depth_follows_the_run(tmp_path):
    assert [depth_factor(at, 0, 1, 0.5, None) for at in (0, 0.25, 0.5, 1)] == [0, 0.5, 1, 1]
    assert [depth_factor(at, 0, 1, 1, 3) for at in (0, 0.3, 0.34, 0.67, 1)] == [0, 0, 0.5, 1, 1]
    rates: list[float] = []

    class Watch(Callback):
        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            rates.append(pl_module.model.blocks[3].drop_path1.drop_prob)

    # A recorder switches dropout off, and what runs after it must find the model's rates all the same.
    for before in ([], [Recorder()]):
        rates.clear()
        task, data = images(model_args={"drop_path_rate": 0.4})
        fit(tmp_path, (task, data), "auto", 1, [*before, StochasticDepthSchedule(), Watch()])
        assert rates == pytest.approx([0.4 * step / 8 for step in range(8)])
        assert before or task.model.blocks[3].drop_path1.drop_prob == pytest.approx(0.4)
    made = images(model_args={"drop_path_rate": 0.4})
    assert_refused("rates must stay below 1, got a factor of 3", tmp_path, made, StochasticDepthSchedule(end=3))
