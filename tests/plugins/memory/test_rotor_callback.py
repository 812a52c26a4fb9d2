"""Rotor in one process: gradients and buffers to the bit, planned forwards, memory within the budget."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dlo_framework.errors import DloError
from dlo_framework.models.recompute import recompute
from dlo_plugins.compile.callback import Compile
from dlo_plugins.memory.planning import Plan
from dlo_plugins.memory.rotor_callback import Rotor
from support.rotor_runs import STEPS, Block, Seen, assert_same, train


@pytest.fixture(autouse=True, scope="module")
def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def plain() -> Seen:
    return train("net", measures=True)


def plan_of(seen: Seen) -> Plan:
    assert seen.rotor is not None
    (plan,) = seen.rotor.plans
    return plan


@pytest.mark.parametrize("budget", [pytest.param("100%", marks=pytest.mark.slow), "50%"])
def test_steps_are_the_same_and_memory_is_within_the_budget(budget: str, plain: Seen) -> None:
    found = train("net", budget, measures=True)
    assert_same(plain, found)
    plan = plan_of(found)
    assert found.peak <= plan.peak <= plan.budget
    assert found.peak >= 0.95 * plan.peak
    assert found.rotor is not None
    assert found.rotor.measured == pytest.approx(found.peak, rel=0.01)
    assert (budget == "100%") == (sum(plan.schedule.forwards) == len(plan.schedule.forwards))
    if budget == "100%":
        assert found.peak == plain.peak
    if budget == "50%":  # Regions save memory.
        assert max(plan.schedule.forwards) > 1
        assert found.peak < 0.55 * plain.peak


def test_blocks_whose_outputs_the_model_reads_run_one_by_one() -> None:
    plain, found = train("reads"), train("reads", "80%")
    assert_same(plain, found)
    plan = plan_of(found)
    assert "uses the output of 'blocks.2'" in plan.measured.refusal
    assert "'blocks.2'" in plan.describe()
    assert found.forwards == []
    assert all(node.first == node.last for node in plan.schedule.nodes)


class Hooked(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.calls = 0
        self.handle = pl_module.model.blocks[1].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


def test_a_users_hook_on_a_block_runs_once_in_a_step() -> None:
    def count(budget: str | None) -> int:
        hooked = Hooked()
        train("net", budget, callbacks=[hooked])
        return hooked.calls

    assert count("60%") == count(None) == STEPS


@pytest.mark.slow
def test_compiled_blocks_run_by_the_schedule() -> None:
    options: dict[str, Any] = {"max_steps": STEPS}
    one = train("net", None, callbacks=[Compile(scope="blocks", backend="aot_eager")], **options)
    other = train("net", "60%", callbacks=[Compile(scope="blocks", backend="aot_eager")], **options)
    assert [list(plan.schedule.forwards)[:-1] for plan in other.rotor.plans] == other.forwards  # type: ignore[union-attr]
    for mine, theirs in zip(one.gradients[-2:], other.gradients[-2:], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_model_is_as_before_after_training() -> None:
    kinds: list[type] = []

    class Last(Callback):
        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            for block in pl_module.model.blocks:
                kinds.append(type(block))
                assert "forward" not in block.__dict__
                assert type(block) is Block

    train("net", "60%", callbacks=[Last()])
    assert len(kinds) == 8


def test_a_budget_in_which_nothing_fits_names_the_least_that_does() -> None:
    with pytest.raises(DloError, match=r"budget must be at least \d+% .* got 5%; set it to \d+%") as refused:
        train("net", "5%")
    least = re.findall(r"set it to (\d+)%", str(refused.value))[0]
    train("net", f"{least}%")


def test_blocks_that_recompute_already_are_refused() -> None:
    class Early(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            recompute(pl_module.model.blocks)

    with pytest.raises(DloError, match=r"blocks must recompute by Rotor alone, got 'blocks.0'"):
        train("net", "60%", callbacks=[Early()])


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(DloError, match="scope: blocks, got scope: model"):
        train("net", "60%", callbacks=[Compile(scope="model", backend="eager")])


def test_a_malformed_budget_is_refused() -> None:
    for budget in ("12 parrots", "0GB", "130%", "-1", "sixty"):
        with pytest.raises(DloError, match="budget must be a size such as 12GB, a share such as 60%, or auto"):
            Rotor(budget)


def test_auto_takes_what_is_left() -> None:
    plan = plan_of(train("net", "auto"))
    assert plan.budget > plan.measured.kept_peak
    assert sum(plan.schedule.forwards) == len(plan.schedule.forwards)
