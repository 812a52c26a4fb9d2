"""Rotor and offloading in runs: gradients and buffers to the bit, planned forwards, memory within the budget; ranks."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from dlo_framework.callback import PluginCallback
from dlo_framework.copy_streams import CopyStreams
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.errors import DloError
from dlo_framework.models.recompute import recompute
from dlo_plugins.compile.callback import Compile
from dlo_plugins.memory import scheduled_blocks
from dlo_plugins.memory.planning import Plan
from dlo_plugins.memory.rotor import keep_fastest
from dlo_plugins.memory.rotor_callback import Rotor
from dlo_plugins.memory.schedule import Chain, Keep, Link, Mode, Stage, plan_transfers, predict
from dlo_plugins.memory.scheduled_blocks import ScheduledBlocks, SimulatedLink, StreamLink
from support.fsdp_nets import trainer
from support.late import LateStream
from support.on_ranks import on_ranks
from support.rotor_runs import STEPS, Block, NetTask, Seen, VirtualClock, assert_same, train


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


@pytest.mark.slow
def test_compiled_blocks_run_by_the_schedule() -> None:
    options: dict[str, Any] = {"max_steps": STEPS}
    one = train("net", None, callbacks=[Compile(scope="blocks", backend="aot_eager")], **options)
    other = train("net", "60%", callbacks=[Compile(scope="blocks", backend="aot_eager")], **options)
    assert [list(plan.schedule.forwards)[:-1] for plan in other.rotor.plans] == other.forwards  # type: ignore[union-attr]
    for mine, theirs in zip(one.gradients[-2:], other.gradients[-2:], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


class Hooked(Callback):
    """Counts the forwards of a block that has a hook, and looks at the blocks after training."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.calls = 0
        pl_module.model.blocks[1].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.after = [(type(block), "forward" in block.__dict__) for block in pl_module.model.blocks]


def test_a_users_hook_on_a_block_runs_once_in_a_step_and_the_model_is_as_before_after_training() -> None:
    hooked = Hooked()
    train("net", "60%", callbacks=[hooked])
    assert hooked.calls == STEPS
    assert hooked.after == [(Block, False)] * 8


def test_a_budget_in_which_nothing_fits_names_the_least_that_does() -> None:
    with pytest.raises(DloError, match=r"budget must be at least \d+% .* got 5%; set it to \d+%") as refused:
        train("net", "5%")
    least = re.findall(r"set it to (\d+)%", str(refused.value))[0]
    train("net", f"{least}%")


def test_a_stem_whose_backward_takes_the_most_sets_the_least_budget() -> None:
    """What it has allocated and kept when the blocks are through is there whatever they keep."""
    plain = train("wide", measures=True)
    with pytest.raises(DloError, match=r"budget must be at least \d+%") as refused:
        train("wide", "40%")
    least = re.findall(r"set it to (\d+)%", str(refused.value))[0]
    found = train("wide", f"{least}%", measures=True)
    assert_same(plain, found)
    plan = plan_of(found)
    assert plan.peak == plan.measured.stem_backward > plan.measured.stem + plan.schedule.peak
    assert found.peak == pytest.approx(plan.peak, abs=64)  # Scalars, such as the loss.
    assert found.peak <= plan.budget
    assert max(plan.schedule.forwards) > 1


def test_auto_takes_what_is_left() -> None:
    plan = plan_of(train("net", "auto"))
    assert plan.budget > plan.measured.kept_peak
    assert sum(plan.schedule.forwards) == len(plan.schedule.forwards)


# offloading in runs: gradients to the bit, memory of the device within the budget, late copies, and errors


MALFORMED = ("12 parrots", "0GB", "130%", "-1", "sixty")
FAST = "100GB/s"  # beside these blocks, so that all that helps is offloaded


@pytest.mark.parametrize("budget", [pytest.param("80%", marks=pytest.mark.slow), "40%"])
def test_steps_are_the_same_and_the_devices_memory_is_within_the_budget(budget: str, plain: Seen) -> None:
    found = train("net", budget, measures=True, link=FAST)
    assert_same(plain, found)
    (plan,) = found.rotor.plans  # type: ignore[union-attr]
    assert plan.offloaded > 0
    assert f"offloaded at {FAST.replace('GB', '.0 GB')}" in plan.describe()
    assert 0.9 * plan.peak <= found.peak <= plan.budget  # Copies of buffers, which not all schedules have, are 3% here.


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("link", [None, FAST])
@pytest.mark.parametrize("kind", ["vit", "coatnet", "resnet", "llama"])
def test_families(kind: str, link: str | None) -> None:
    """tests/composition has the strategies."""
    plain, gains, free = train(kind, measures=True), [], []
    for budget in ("90%", "75%", "60%", "50%", "40%"):
        try:
            found = train(kind, budget, measures=True, link=link)
        except DloError as error:
            assert "budget must be at least" in str(error)  # noqa: PT017
            break
        assert_same(plain, found)
        plan = plan_of(found)
        assert 0.95 * plan.peak <= found.peak <= plan.budget
        assert not plan.measured.refusal
        gains.append(plan.offloaded > 0 if link else max(plan.schedule.forwards) > 1)
        free.append(plan.schedule.time <= keep_fastest(plan.measured.chain).time)
    # Where measured blocks are as fast when they keep less, as a ResNet's may be, copies have nothing to save.
    assert sum(gains) >= (1 if kind == "resnet" else 2) or (link and all(free)), (gains, free)


def test_with_accumulation_and_bf16() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "precision": "bf16-mixed", "max_steps": -1}
    one, other = train("net", None, **options), train("net", "60%", link=FAST, **options)
    assert other.rotor.plans[0].offloaded > 0  # type: ignore[union-attr]
    assert all(map(torch.equal, one.gradients, other.gradients))


def test_what_streams_have_not_copied_is_not_read(plain: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams whose copies run when they are waited for, and whose targets have wrong values until then."""
    streams = CopyStreams(LateStream(), LateStream())  # type: ignore[arg-type]
    monkeypatch.setattr(scheduled_blocks, "copy_streams", lambda device: streams)
    monkeypatch.setattr(Rotor, "_make_link", lambda self, device, link: StreamLink(device))
    found = train("net", "50%", measures=True, link=FAST)
    assert found.rotor.plans[0].offloaded > 0  # type: ignore[union-attr]
    assert_same(plain, found)


class Square(torch.nn.Module):
    """Block that saves its output and its input, and may change its input in place."""

    def __init__(self, spoils: bool = False) -> None:
        super().__init__()
        self.weight, self.spoils = torch.nn.Parameter(torch.ones(64)), spoils

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(x * self.weight)
        if self.spoils:
            x.add_(1.0)
        return out


def offloaded_blocks(blocks: list[Any], link: Any) -> ScheduledBlocks:
    stages = [Stage(f"{n}", 256, (Mode("all", 1024, 1.0, 2.0),)) for n in range(len(blocks))]
    chain = Chain((*stages, Stage("head", 0, (Mode("all", 0, 0.1, 0.1),))), 256)
    nodes = [Keep(n, offload=0 < n < 3) for n in range(len(blocks))] + [Keep(len(blocks))]
    schedule = predict(chain, nodes, plan_transfers(chain, nodes, keep_fastest(chain).peak), link.link)
    return ScheduledBlocks(blocks, [f"{n}" for n in range(len(blocks))], schedule, link)


def test_a_saved_tensor_that_changes_in_place_is_an_error_as_without_offloading() -> None:
    blocks = [Square(), Square(), Square(spoils=True), Square()]
    link = SimulatedLink(Link(1e9, 1e9), VirtualClock())

    def step() -> None:
        x = torch.ones(1, 64, requires_grad=True)
        for block in blocks:
            x = block(x)
        x.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step()
    executed = offloaded_blocks(blocks, link)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step()
    executed.begin_step()
    blocks[2].spoils = False
    step()
    executed.remove()


def test_blocks_that_are_removed_after_an_error_leave_no_copies() -> None:
    blocks = [Square() for _ in range(4)]
    link = SimulatedLink(Link(1e9, 1e9), VirtualClock())
    executed = offloaded_blocks(blocks, link)
    x: torch.Tensor = torch.ones(1, 64, requires_grad=True)
    for block in blocks[:3]:  # The step fails before the backward.
        x = block(x)
    assert link._running
    executed.remove()
    assert not link._running


@pytest.mark.parametrize(
    ("budget", "options", "message"),
    [
        *((budget, {}, "budget must be a size such as 12GB, a share such as 60%, or auto") for budget in MALFORMED),
        ("60%", {"link": "12GB/s"}, "link must come with offload: true, got 12GB/s without; set offload: true"),
        ("60%", {"offload": True, "link": "fast"}, "link must be a rate such as 25GB/s, or auto, got fast; set one of"),
        ("60%", {"offload": True, "link": "0"}, "link must be a rate such as 25GB/s, or auto, got 0"),
    ],
)
def test_malformed_options(budget: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DloError, match=message):
        Rotor(budget, **options)


class Early(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        recompute(pl_module.model.blocks)


@pytest.mark.parametrize(
    ("callback", "link", "message"),
    [
        (Early(), None, r"blocks must recompute by Rotor alone, got 'blocks.0'"),
        (Compile(scope="model", backend="eager"), None, "scope: blocks, got scope: model"),
        (Callback(), "auto", r"offload must have a link on a CPU, .*; set link: 25GB/s, which is simulated"),
    ],
)
def test_runs_that_do_not_fit_are_refused(callback: Callback, link: str | None, message: str) -> None:
    with pytest.raises(DloError, match=message):
        train("net", "60%", link=link, callbacks=[callback])


# --- on ranks ---------------------------------------------------------------------------------------------------


class Changing(PluginCallback):
    """Callback that may change batches, and leaves it to the data."""

    changes_batch_shapes = True


@on_ranks(2)
def test_ranks_survey_again_together(rank: int, world_size: int, folder: Path) -> None:
    """A survey on one rank alone would leave it waiting for the others' plans.

    A batch is larger on rank 0, and then larger ones come on both ranks.
    """
    sizes = [8] * 5 + [16 if rank == 0 else 8] + [8] * 2 + [32] * 6
    batches = [(torch.randn(size, 16), torch.randint(4, (size,))) for size in sizes]
    rotor = Rotor("80%")
    run = trainer(world_size, DataParallelStrategy(), callbacks=[rotor, Changing()], default_root_dir=folder)
    run.fit(NetTask(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert (run.global_step, rotor._measured_bytes) == (14, 32 * (16 * 4 + 8))
    assert [plan.measured.chain.input for plan in rotor.plans] == [32 * 32 * 4]  # The plan is of the larger batch.
