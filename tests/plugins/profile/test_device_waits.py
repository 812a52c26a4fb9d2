"""Lines that wait for the device, found by the operators that read values."""

import linecache

import torch

from dlo_framework.finite import _Flag
from dlo_plugins.profile.device_waits import WaitRecorder


def waits_of(run) -> list:
    recorder = WaitRecorder(torch.device("cpu"))
    with recorder:
        run()
    return recorder.waits()


def test_each_read_of_a_value_is_found_at_its_line() -> None:
    x = torch.arange(6.0)

    def run() -> None:
        for _ in range(3):
            x.sum().item()  # a planted wait
        x.nonzero()
        x[x > 2]

    found = waits_of(run)
    assert {(wait.operation, wait.count) for wait in found} == {("item", 3), ("nonzero", 1), ("indexing by a mask", 1)}
    (item,) = (wait for wait in found if wait.operation == "item")
    assert item.source == "x.sum().item()  # a planted wait"
    path, _, line = item.place.rpartition(":")
    assert linecache.getline(path, int(line)).strip() == item.source
    assert item.function.endswith("run")


def test_what_needs_no_value_is_not_found() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    y = torch.randn(4)

    def run() -> None:
        (x @ x).relu().sum().backward()
        y[torch.tensor([0, 1])]
        y.masked_fill_(y > 0, 1.0)
        y[y > 0] = 0.0  # A single value: filled by a mask.

    assert waits_of(run) == []


def test_an_optimizers_count_of_steps_is_the_hosts() -> None:
    weight = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    weight.grad = torch.ones(4)
    assert waits_of(optimizer.step) == []


def test_the_check_of_losses_reads_a_copy_that_is_the_hosts() -> None:
    flag = _Flag()

    def run() -> None:
        flag.look(torch.ones(()))
        flag.read()

    assert waits_of(run) == []


def test_copies_between_host_and_device_are_found_by_their_devices() -> None:
    recorder = WaitRecorder(torch.device("cuda"))
    there, here = torch.empty(2, device="meta"), torch.empty(2)
    copy, to_copy = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
    assert recorder._operation(to_copy, (there,), {"device": "cpu"}) == "copy to the host"
    assert recorder._operation(to_copy, (here,), {"device": "meta"}) == "copy from the host"
    assert recorder._operation(to_copy, (here,), {"device": "meta", "non_blocking": True}) is None
    assert recorder._operation(copy, (here, there), {}) == "copy to the host"
    assert recorder._operation(copy, (here, there, True), {}) is None
    assert recorder._operation(copy, (here, here), {}) is None
