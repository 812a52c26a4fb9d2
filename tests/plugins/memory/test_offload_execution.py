"""Offloading in runs: gradients to the bit, memory of the device within the budget, late copies, and errors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from dlo_framework.copy_streams import CopyStreams
from dlo_framework.errors import DloError
from dlo_plugins.memory import scheduled_blocks
from dlo_plugins.memory.rotor import keep_fastest
from dlo_plugins.memory.rotor_callback import Rotor
from dlo_plugins.memory.schedule import Chain, Keep, Link, Mode, Stage, plan_transfers, predict
from dlo_plugins.memory.scheduled_blocks import ScheduledBlocks, SimulatedLink, StreamLink
from support.late import LateStream
from support.rotor_runs import Seen, VirtualClock, assert_same, train

FAST = "100GB/s"  # beside these blocks, so that all that helps is offloaded


@pytest.fixture(autouse=True, scope="module")
def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def plain() -> Seen:
    return train("net", measures=True)


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
@pytest.mark.parametrize("kind", ["vit", "coatnet", "resnet", "llama"])
def test_families(kind: str) -> None:
    plain, offloads, free = train(kind, measures=True), [], []
    for budget in ("90%", "75%", "60%", "50%", "40%"):
        try:
            found = train(kind, budget, measures=True, link=FAST)
        except DloError as error:
            assert "budget must be at least" in str(error)  # noqa: PT017
            break
        assert_same(plain, found)
        (plan,) = found.rotor.plans  # type: ignore[union-attr]
        assert 0.95 * plan.peak <= found.peak <= plan.budget
        offloads.append(plan.offloaded > 0)
        free.append(plan.schedule.time <= keep_fastest(plan.measured.chain).time)
    # Where measured blocks are as fast when they keep less, as a ResNet's may be, copies have nothing to save.
    assert sum(offloads) >= (1 if kind == "resnet" else 2) or all(free), (offloads, free)


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
    ("options", "message"),
    [
        ({"link": "12GB/s"}, "Rotor: link must come with offload: true, got 12GB/s without; set offload: true"),
        ({"offload": True, "link": "fast"}, "link must be a rate such as 25GB/s, or auto, got fast; set one of these"),
        ({"offload": True, "link": "0"}, "link must be a rate such as 25GB/s, or auto, got 0"),
    ],
)
def test_malformed_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DloError, match=message):
        Rotor("60%", **options)


def test_offloading_without_a_link_names_the_fix() -> None:
    message = r"Rotor: offload must have a link on a CPU, .*; set link: 25GB/s, which is simulated"
    with pytest.raises(DloError, match=message):
        train("net", "60%", link="auto")
