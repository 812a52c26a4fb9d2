"""The kernel of Adam that is compiled for this CPU: torch's values, state and hooks, and torch's step elsewhere."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from dlo_framework.distributed import cpu_adam
from dlo_framework.distributed.cpu_adam import build_kernel, use_cpu_kernel

MAKES: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
    "adam, no decay": lambda groups: torch.optim.Adam(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-3),
    "adam, an L2 penalty": lambda groups: torch.optim.Adam(groups, lr=0.1, weight_decay=0.1),
}


@pytest.fixture
def kernel() -> Any:
    found = build_kernel()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def parameters() -> list[nn.Parameter]:
    """A tensor that threads share, one of another order in memory, small ones, a number, and none."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in ((300, 257), (2, 3, 4, 5), (17,), (), (0,))]
    made[1] = made[1].to(memory_format=torch.channels_last)
    return [nn.Parameter(each) for each in made]


def train(make: Any, use: bool, steps: int = 6) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Trains with two groups, a rate and betas that change, and a parameter without its first two gradients."""
    held = parameters()
    optimizer = make([{"params": held[:2]}, {"params": held[2:], "weight_decay": 0.0}])
    for group in optimizer.param_groups:
        group["fused"] = True
    if use:
        assert use_cpu_kernel(optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for number, parameter in enumerate(held):
            drawn = torch.randn(parameter.shape, generator=generator)
            gradient = torch.empty_like(parameter).copy_(drawn)  # In the parameter's order in memory.
            parameter.grad = None if number == 2 and step < 2 else gradient
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = 0.1 / (step + 1), (0.8 + 0.01 * step, 0.95)
        optimizer.step()
    return held, optimizer


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MAKES)
def test_values_and_state_are_those_of_torchs_fused_step(
    kernel: Any, name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(cpu_adam, "build_kernel", lambda: lambda *args: (calls.append(args[5]), kernel(*args)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (ours, mine), (theirs, other) = train(MAKES[name], True), train(MAKES[name], False)
    finally:
        torch.set_num_threads(before)
    assert calls == [threads] * (4 * 4 + 3)  # Five tensors in steps with their state: the first step makes it.
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
        assert mine.state[one].keys() == other.state[two].keys()
        for key, value in mine.state[one].items():
            torch.testing.assert_close(value, other.state[two][key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda groups: torch.optim.AdamW(groups, amsgrad=True), torch.float32),
        (lambda groups: torch.optim.AdamW(groups, maximize=True), torch.float32),
        (lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1)), torch.float32),
        (lambda groups: torch.optim.AdamW(groups), torch.float64),
    ],
)
def test_what_the_kernel_does_not_compute_is_torchs_step(kernel: Any, make: Any, dtype: torch.dtype) -> None:
    both = []
    for use in (True, False):
        parameter = nn.Parameter(torch.arange(1.0, 5.0, dtype=dtype))
        optimizer = make([parameter])
        if use:
            use_cpu_kernel(optimizer)
        for step in range(3):
            parameter.grad = torch.full_like(parameter, 0.3 + step)
            optimizer.step()
        both.append(parameter.detach())
    assert torch.equal(*both)


def test_a_backward_with_the_weights_before_a_step_is_an_error(kernel: Any) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    assert use_cpu_kernel(optimizer)
    for _ in range(2):  # The first step is torch's.
        loss = parameter.square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_hooks_closures_schedulers_and_copies_work(kernel: Any) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    use_cpu_kernel(optimizer)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        called.append("closure")
        return loss

    for _ in range(2):
        assert optimizer.step(closure) > 0
        scheduler.step()
    assert called == ["before", "closure", "after"] * 2
    twin = copy.deepcopy(optimizer)
    weights = parameter.detach().clone()
    twin.param_groups[0]["params"][0].grad = torch.ones(4)
    twin.step()
    assert torch.equal(parameter, weights)  # The copy has stepped its own.


def test_a_compiler_that_fails_is_named_and_torch_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_kernel.cache_clear()
    monkeypatch.setenv("CC", "false")
    optimizer = torch.optim.AdamW(parameters())
    try:
        with caplog.at_level(logging.INFO):
            assert not use_cpu_kernel(optimizer)
    finally:
        build_kernel.cache_clear()
    assert "torch's fused kernel, because false fails" in caplog.text
    assert "step" not in optimizer.__dict__
