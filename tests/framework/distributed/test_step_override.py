"""A step that replaces an optimizer's own calls hooks as torch does, and is named in a profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

from dlo_framework.distributed.optimizer_steps import StepOverride


@pytest.mark.parametrize("overrides", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_hooks_get_what_torchs_get(closed: bool, overrides: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    if overrides:
        StepOverride(optimizer, lambda: parameter.sub_(0.5 * parameter.grad))
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *given: seen.append(given))
    optimizer.register_step_post_hook(lambda *given: seen.append(given))

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        return 3.0

    with profile() as found:
        loss = optimizer.step(closure) if closed else optimizer.step()
    args = (optimizer, closure) if closed else (optimizer,)
    assert seen == [(optimizer, args, {}), *([True] if closed else []), (optimizer, args, {})]
    assert loss == (3.0 if closed else None)
    assert parameter.tolist() == [0.5, 0.5]
    assert any(event.name == "Optimizer.step#SGD.step" for event in found.events())
