"""A user's tensor rules are tried on values before the first step; what they do not say is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_framework import DloError, ParallelPlan
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from support.odd_modules import INPUTS, WIDTH, Block, Odd, block, put


class WithExample(Odd):
    rules_of: tuple[str, ...] = ("column", "row")
    more: dict[str, str] = {}  # noqa: RUF012

    def example_batch(self, datamodule: Any) -> Any:
        return torch.zeros(1, INPUTS), torch.zeros(1, dtype=torch.long)

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        return replace(plan, tensor={**dict(zip(plan.tensor, self.rules_of, strict=True)), **self.more})


def made(**members: Any) -> WithExample:
    task = type("Made", (WithExample,), members)()
    task.configure_model()
    return task


def completed(task: Any) -> ParallelPlan:
    tensor = TensorParallel()
    plan = tensor.complete_plan(task, task.parallel_plan(), 2)
    tensor.check(task.model, plan, 2)
    return plan


def packed(self: Any, hidden: Tensor) -> Tensor:
    gate, value = hidden.chunk(2, -1)
    return torch.sigmoid(gate) * value


PACKED = block(act=packed, more=lambda self: put(self, fc1=nn.Linear(WIDTH, 32)))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            {"block": block(act=lambda self, hidden: hidden.softmax(-1))},
            r"fc1: column, fc2: row, .* differs by \de-0\d",
        ),
        ({"block": PACKED}, "fc1: column, fc2: row, .* differs by"),
        ({"block": PACKED, "rules_of": ("gate_up", "row")}, None),
        ({}, None),
        ({"more": {"blocks.*.norm": "replicate"}}, None),
    ],
    ids=["softmax", "packed", "gate_up", "no rule of the norm", "replicated norm"],
)
def test_rules_must_give_the_full_blocks_values(members: dict[str, Any], message: str | None) -> None:
    task = made(**members)
    if message is not None:
        with pytest.raises(DloError, match=message):
            completed(task)
        return
    plan = completed(task)
    assert plan.rule_for("blocks.3.norm.weight") in ("sequence", "replicate")
    task.example_batch = lambda datamodule: None
    completed(task)  # Shapes tell where a norm of the block's width works.


def test_a_rule_that_is_wrong_is_named_without_the_others() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), block(act=lambda self, hidden: hidden.softmax(-1))()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    rules = {"blocks.*.*.fc1": "column", "blocks.*.*.fc2": "row"}
    task = made(block=Two, parallel_plan=lambda self: replace(Odd.parallel_plan(self), tensor=rules))
    with pytest.raises(DloError, match=r"got two\.fc1: column, two\.fc2: row, with which"):
        completed(task)
