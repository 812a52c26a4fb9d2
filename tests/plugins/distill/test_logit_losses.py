"""Distances between logits: their definitions, their gradients beside autograd's, and classes split over ranks."""

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_framework.distillation import logit_losses
from dlo_framework.errors import DloError
from dlo_plugins.distill.student_losses import WITHOUT_TEMPERATURE, LogitDistance, LogitLossName

NAMES = get_args(LogitLossName)


def both(rows: int = 5, classes: int = 11, scale: float = 3.0, dtype: torch.dtype = torch.float64) -> Any:
    draw = torch.Generator().manual_seed(0)
    return [scale * torch.randn(rows, classes, generator=draw, dtype=dtype) for _ in range(2)]


def distance(name: Any) -> LogitDistance:
    return LogitDistance(name, 1.0 if name in WITHOUT_TEMPERATURE else 2.5, beta=0.3)


def by_definition(loss: LogitDistance, s: Tensor, t: Tensor) -> Tensor:
    """The losses as their papers write them, `[n]`, with autograd's gradient."""
    T, b = loss.temperature, loss.beta
    q, p = torch.softmax(s / T, 1), torch.softmax(t / T, 1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return F.kl_div(b.log(), a, reduction="none").sum(1)

    m = b * p + (1 - b) * q
    written = {
        "kl": lambda: T**2 * kl(p, q),
        "cross_entropy": lambda: T**2 * F.cross_entropy(s / T, p, reduction="none"),
        "reverse_kl": lambda: T**2 * kl(q, p),
        "jsd": lambda: T**2 * (b * kl(p, m) + (1 - b) * kl(q, m)),
        "wasserstein": lambda: T * (q.sort(1, descending=True)[0] - p.sort(1, descending=True)[0]).abs().sum(1),
        "mse": lambda: F.mse_loss(s, t, reduction="none").mean(1),
        "hard": lambda: F.cross_entropy(s, t.argmax(1), reduction="none"),
    }
    return written[loss.name]()


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_the_definition(name: str) -> None:
    s, t = both()
    reference, ours = s.clone().requires_grad_(), s.clone().requires_grad_()
    expected = by_definition(distance(name), reference, t)
    found = logit_losses(distance(name), ours, t)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)  # backward scales each sample's gradient by its own
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-8, atol=1e-10)
    assert torch.equal(s, both()[0]), "the logits of the caller have been overwritten"
    assert float(ours.grad.abs().sum()) > 0


@pytest.mark.parametrize("name", NAMES)
def test_equal_logits_have_no_distance_and_extreme_ones_stay_finite(name: str) -> None:
    s, _ = both()
    if name not in ("cross_entropy", "hard"):
        assert float(logit_losses(distance(name), s, s.clone()).abs().max()) < 1e-12
    far, other = both(scale=400.0, dtype=torch.float32)
    far.requires_grad_()
    losses = logit_losses(distance(name), far, other)
    losses.sum().backward()
    assert bool(torch.isfinite(losses).all())
    assert bool(torch.isfinite(far.grad).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be above 0, got nan"),
        ({"name": "mse", "temperature": 2.0}, "temperature must be 1 with loss: mse"),
        ({"name": "jsd", "beta": 1.0}, "beta must be above 0 and below 1, got 1.0"),
        ({"name": "cosine"}, "loss must be one of kl,"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DloError, match=message):
        LogitDistance(**options)
