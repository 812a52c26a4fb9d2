"""A frozen model in CPU memory: its outputs to the bit, what the device holds, and copies that arrive late."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlo_framework import placed_model
from dlo_framework.copy_streams import CopyStreams
from dlo_framework.placed_model import OffloadedBlocks, PlacedModel
from support import frozen_runs as runs
from support.late import LateStream

#: Another name of the CPU's memory, which passes for an accelerator's: copies between the two go by the side streams.
DEVICE = torch.device("cpu", 0)


class Counted(LateStream):
    """Late copies, whose targets are counted while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def copy(self, target: Tensor, source: Tensor, records: bool = True) -> Any:
        self.targets.append(weakref.ref(target))
        self.peak = max(self.peak, self.live_bytes())
        return super().copy(target, source, records)

    def live_bytes(self) -> int:
        return sum(target.nbytes for ref in self.targets if (target := ref()) is not None)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Counted:
    up = Counted()
    streams = CopyStreams(up, LateStream())  # type: ignore[arg-type]
    monkeypatch.setattr(placed_model, "copy_streams", lambda device: streams)
    monkeypatch.setattr(
        placed_model,
        "empty_host_tensor",
        lambda like, device: torch.empty_like(like, device="cpu"),  # A CPU alone has no page-locked memory.
    )
    return up


def task_of(kind: str) -> Any:
    torch.manual_seed(3)
    task = runs.TASKS[kind]()
    task.configure_model()
    return task.eval().requires_grad_(False)


def blocks_of(task: Any) -> list[nn.Module]:
    return list(task.model.blocks if hasattr(task.model, "blocks") else task.model.model.layers)


def bytes_of(module: nn.Module) -> int:
    return sum(-(-t.nbytes // 512) * 512 for t in [*module.parameters(), *module.buffers()])


@pytest.mark.parametrize("kind", ["images", "text"])
def test_outputs_are_the_same_and_the_device_has_two_blocks_at_most(kind: str, stream: Counted) -> None:
    plain = PlacedModel(task_of(kind), torch.device("cpu"))
    task = task_of(kind)
    blocks = blocks_of(task)
    total, block = bytes_of(task), bytes_of(blocks[0])
    placed = PlacedModel(task, DEVICE, offload=True)
    assert stream.live_bytes() == 0
    before: list[int] = []
    for each in blocks:
        each.register_forward_pre_hook(lambda *_: before.append(len(stream.queue)))
    for batch in runs.batches(kind):
        assert torch.equal(placed.outputs(batch), plain.outputs(batch))
        assert stream.live_bytes() == 0
    assert stream.peak == total - (len(blocks) - 2) * block
    assert before == [1, 1, 1, 0] * runs.STEPS, "the next block's copy has been started, and not been waited for"
    assert placed.held_bytes() == total
    if kind == "text":
        hidden = plain.outputs(runs.batches(kind)[0])
        with placed.gathered(), plain.gathered():
            assert torch.equal(placed.head.logits(hidden[0]), plain.head.logits(hidden[0]))
            assert stream.live_bytes() == total - len(blocks) * block
    assert stream.live_bytes() == 0


def test_weights_that_are_loaded_are_those_that_compute(stream: Counted) -> None:
    class Saved:
        def read_into(self, name: str, target: Tensor) -> None:
            target.copy_(others[name])

    other = runs.text_task()
    other.configure_model()
    others = other.eval().state_dict()
    placed = PlacedModel(task_of("text"), DEVICE, offload=True)
    batch = runs.batches("text")[0]
    first = placed.outputs(batch)
    placed.load(Saved())
    assert torch.equal(placed.outputs(batch), PlacedModel(other, torch.device("cpu")).outputs(batch))
    assert not torch.equal(placed.outputs(batch), first)


class Shuffled(nn.Module):
    """Uses one block twice and leaves one out; two blocks share a layer; a weight has other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(4))
        self.blocks[3][0] = self.blocks[0][0]  # type: ignore[index]
        self.register_buffer("scale", torch.tensor(3, dtype=torch.int64))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        for number in (1, 0, 1, 3):
            x = self.blocks[number](x)
        return x * self.scale


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_in_another_order_shared_layers_and_an_error_leave_nothing_on_the_device(
    stream: Counted, fails: bool
) -> None:
    torch.manual_seed(4)
    model = Shuffled().eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    offloaded = OffloadedBlocks(model, list(model.blocks), DEVICE)
    assert model.blocks[1][0].weight.stride() == (27, 1, 9, 3)  # type: ignore[index]
    if fails:
        model.blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), contextlib.suppress(ZeroDivisionError), offloaded.root_on_device(), offloaded.prefetching():
        found = model(x)
        assert not fails
        assert torch.equal(found, expected)
    assert stream.live_bytes() == 0
    assert stream.queue == type(stream.queue)()
    offloaded.remove()
    if not fails:
        assert torch.equal(model(x), expected), "the tensors have their values in CPU memory"


def test_a_cpu_copies_nothing() -> None:
    task = task_of("text")
    addresses = [parameter.data_ptr() for parameter in task.parameters()]
    placed = PlacedModel(task, torch.device("cpu"), offload=True)
    placed.outputs(runs.batches("text")[0])
    assert [parameter.data_ptr() for parameter in task.parameters()] == addresses
