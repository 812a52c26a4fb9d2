"""A number that a user's hook computes from several gradients is refused where ranks have other ones."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_plugins.sharding.user_code import JointGradients


def _summed_in_python(model: nn.Module) -> float:
    return math.sqrt(sum(p.grad.norm().item() ** 2 for p in model.parameters()))


def _summed_in_place(model: nn.Module) -> None:
    total = torch.zeros(1)
    for parameter in model.parameters():
        total += parameter.grad.pow(2).sum()


def _written_to_places(model: nn.Module) -> None:
    norms = torch.zeros(4)
    for place, parameter in enumerate(model.parameters()):
        norms[place] = parameter.grad.data.norm()
    norms.norm()


def _each_by_itself(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, 1.0)
        parameter.grad = (parameter.grad * 0.5 + torch.randn_like(parameter)).clamp_(-1, 1)


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


JOINT: tuple[Callable[[Any], Any], ...] = (
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    lambda model: nn.utils.clip_grad_norm_([*model.parameters()], 1.0, norm_type=math.inf, foreach=False),
    lambda model: nn.utils.get_total_norm(_gradients(model)),
    lambda model: torch.stack([gradient.norm() for gradient in _gradients(model)]).norm(),
    lambda model: torch.cat([gradient.flatten() for gradient in _gradients(model)]).norm(),
    lambda model: any(bool(gradient.isnan().any()) for gradient in _gradients(model)),
    lambda model: grad_norm(model, 2),
    _summed_in_python,
    _summed_in_place,
    _written_to_places,
)
SINGLE: tuple[Callable[[Any], Any], ...] = (
    lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    lambda model: torch._foreach_mul_(_gradients(model), 0.5),
    lambda model: torch._foreach_norm(_gradients(model)),
    lambda model: float(_gradients(model)[0].norm()),
    _each_by_itself,
)


def test_a_number_from_several_gradients_is_refused_where_ranks_have_others() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model(torch.randn(5, 3)).square().sum().backward()
    for use in SINGLE:
        with JointGradients("pp=2"):
            use(model)
    for use in JOINT:
        before = [gradient.clone() for gradient in _gradients(model)]
        with (
            pytest.raises(DloError, match=r"does not support pp=2: .* \(test_gradient_guards.py:\d+\); clip by"),
            JointGradients("pp=2"),
        ):
            use(model)
        assert all(map(torch.equal, before, _gradients(model)))
