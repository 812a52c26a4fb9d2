"""The norm of a gradient: exact enough at any size, whoever holds it."""

import pytest
import torch

from dlo_framework.norms import collect_gradients, total_norm


@pytest.mark.parametrize("shape", [(3,), (1 << 14,), (40_000,), (1 << 15,), (1000, 4001)])
def test_it_is_the_norm_in_double_precision(shape):
    """torch's own is off by 3e-5 at the last of these."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(of)) for of in (shape, (5,), shape)]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    expected = torch.cat([p.grad.double().flatten() for p in parameters[:2]]).norm()
    found = total_norm(collect_gradients(torch.optim.SGD(parameters, lr=0.1)))
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_gradients_that_are_not_contiguous_empty_or_missing_count():
    first, second, third = (torch.nn.Parameter(torch.zeros(200, 300)) for _ in range(3))
    first.grad, second.grad = torch.randn(300, 200).T, torch.randn(200, 300)
    empty = torch.nn.Parameter(torch.zeros(0))
    empty.grad = torch.zeros(0)
    expected = (first.grad.double().square().sum() + second.grad.double().square().sum()).sqrt()
    gradients = collect_gradients(torch.optim.SGD([first, second, third, empty], lr=0.1))
    assert float(total_norm(gradients)) == pytest.approx(float(expected), rel=1e-5)
    assert float(total_norm([])) == 0
    doubles = [gradient.double() for gradient in gradients]
    mixed = total_norm([*gradients, *doubles])
    assert mixed.dtype == torch.float64
    assert float(mixed) == pytest.approx(float(expected) * 2**0.5, rel=1e-6)
