"""Ranges around modules: their order in forward and backward, and nothing of them in the results or afterwards."""

from typing import Any

import pytest
import torch
from torch import nn

from dlo_plugins.profile.module_ranges import ModuleRanges, trace_ranges


class Log:
    """Ranges as NVTX has them, by id."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self._names: list[str] = []

    def begin(self, module: str, phase: str) -> int:
        name = f"{module} {phase}"
        self.events.append(("begin", name))
        self._names.append(name)
        return len(self._names) - 1

    def end(self, number: int) -> None:
        self.events.append(("end", self._names[number]))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_backward_ranges_are_in_the_order_of_backward_and_gradients_are_equal() -> None:
    model, x, log = net(), torch.randn(3, 4), Log()
    plain = gradients(model, x)
    ranges = ModuleRanges(model, log.begin, log.end)
    ranges.start()
    found = gradients(model, x)
    ranges.end_backward()
    ranges.stop()
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    begins = [name for what, name in log.events if what == "begin"]
    ends = [name for what, name in log.events if what == "end"]
    assert begins == [
        "0 forward", "1 forward", "2 forward", "2 backward", "1 backward", "0 backward",
    ]  # fmt: skip
    assert sorted(ends) == sorted(begins)  # also that of layer 0, whose input has no gradient
    assert log.events.index(("end", "2 backward")) < log.events.index(("begin", "0 backward"))
    log.events.clear()
    gradients(model, x)
    assert log.events == []


def test_hooks_are_gone_afterwards_also_after_an_error() -> None:
    model = net()

    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    handle = model[2].register_forward_pre_hook(fail)
    ranges = trace_ranges(model)
    ranges.start()
    with pytest.raises(RuntimeError, match="boom"):
        model(torch.randn(3, 4))
    ranges.stop()
    handle.remove()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert not any(part._forward_hooks_always_called for part in model.modules())
