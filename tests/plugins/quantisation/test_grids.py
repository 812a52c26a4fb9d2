"""The arithmetic of rounding is torchao's: to the bit, in forward and, but for the bounds, in backward."""

import pytest
import torch
from torchao.quantization import Int8Tensor, MappingType, PerRow, ZeroPointDomain
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig
from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase

from dlo_plugins.quantisation.schemes import (
    Grid,
    affine_grid,
    fake_quantise,
    float8_grid,
    grid_of_scale,
    levels,
    rounding_gradient,
    symmetric_grid,
    traced_fake_quantise,
)

DTYPES = [torch.float32, torch.bfloat16]
EPS = torch.finfo(torch.float32).eps


def weights(dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Rows of zeros, of one sign and of both."""
    found = (scale * torch.randn(48, 96, generator=torch.Generator().manual_seed(3))).to(dtype)
    found[3], found[4], found[5] = 0, found[4].abs(), -found[5].abs()
    return found


@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_symmetric_rounding_is_torchaos_conversion(dtype: torch.dtype, scale: float) -> None:
    weight = weights(dtype, scale)
    converted = Int8Tensor.from_hp(weight, PerRow(), MappingType.SYMMETRIC_NO_CLIPPING_ERR)
    grid = symmetric_grid(weight, 8)
    assert torch.equal(levels(weight, grid).float(), converted.qdata.float())
    assert torch.equal(fake_quantise(weight, grid), converted.dequantize())


@pytest.mark.parametrize(("bits", "kind"), [(8, torch.int8), (4, torch.int4), (3, torch.int3), (2, torch.int2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_symmetric_rounding_is_torchaos_fake_quantiser(dtype: torch.dtype, bits: int, kind: torch.dtype) -> None:
    """With the scales of torchao's fake quantiser, which has no other than its default range."""
    weight, gradient = weights(dtype).requires_grad_(), weights(dtype).roll(1).detach()
    theirs = FakeQuantizerBase.from_config(IntxFakeQuantizeConfig(kind, "per_channel", is_symmetric=True, eps=EPS))
    expected = theirs(weight)
    expected.backward(gradient)
    grid = grid_of_scale(theirs.scale, bits)
    assert torch.equal(fake_quantise(weight.detach(), grid), expected)
    _compare_gradients(weight, grid, gradient, dtype)


@pytest.mark.parametrize("group_size", [32, 96])
@pytest.mark.parametrize(("bits", "kind"), [(4, torch.uint4), (8, torch.uint8), (2, torch.uint2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_affine_rounding_is_torchaos_fake_quantiser(
    dtype: torch.dtype, bits: int, kind: torch.dtype, group_size: int
) -> None:
    weight, gradient = weights(dtype).requires_grad_(), weights(dtype).roll(1).detach()
    config = IntxFakeQuantizeConfig(
        kind,
        group_size=group_size,
        is_symmetric=False,
        scale_precision=dtype,
        zero_point_precision=dtype,
        zero_point_domain=ZeroPointDomain.FLOAT,
    )
    expected = FakeQuantizerBase.from_config(config)(weight)
    expected.backward(gradient)
    grid = affine_grid(weight.detach(), bits, group_size)
    assert torch.equal(fake_quantise(weight.detach(), grid), expected)
    _compare_gradients(weight, grid, gradient, dtype)


def _compare_gradients(weight: torch.Tensor, grid: Grid, gradient: torch.Tensor, dtype: torch.dtype) -> None:
    """torchao's gradient at the first and last level is torch.clamp's, which differs between versions of torch."""
    ours, theirs = rounding_gradient(weight.detach(), grid, gradient), weight.grad
    found = levels(weight.detach(), grid)
    inside = (found > grid.bounds[0]) & (found < grid.bounds[1])
    assert theirs is not None
    assert inside.float().mean() > 0.3
    if dtype == torch.float32:
        assert torch.equal(ours[inside], theirs[inside])
    else:
        torch.testing.assert_close(ours[inside], theirs[inside], rtol=2**-7, atol=0)


def test_float8_rounding_is_torchaos_fake_quantiser() -> None:
    weight = weights(torch.float32)
    weight[3] = 1  # torchao divides a row of zeros by 0.
    expected = FakeQuantizerBase.from_config(Float8FakeQuantizeConfig())(weight)
    assert torch.equal(fake_quantise(weight, float8_grid(weight)), expected)
    assert torch.equal(fake_quantise(torch.zeros(2, 32), float8_grid(torch.zeros(2, 32))), torch.zeros(2, 32))


@pytest.mark.parametrize("make", [lambda w: symmetric_grid(w, 4), lambda w: affine_grid(w, 4, 32), float8_grid])
def test_the_traced_form_is_the_same(make) -> None:
    weight, gradient = weights(torch.float32).requires_grad_(), weights(torch.float32).roll(1)
    grid = make(weight.detach())
    traced = traced_fake_quantise(weight, grid)
    traced.backward(gradient)
    assert torch.equal(traced, fake_quantise(weight.detach(), grid))
    torch.testing.assert_close(weight.grad, rounding_gradient(weight.detach(), grid, gradient), rtol=1e-6, atol=0)


@pytest.mark.parametrize("largest", [2.7, -2.7])
def test_a_change_of_the_last_bit_changes_no_level_of_the_largest_value(largest: float) -> None:
    row = torch.linspace(-1, 1, 32)
    row[7] = largest
    near = row.clone()
    for _ in range(50):
        near[7] = torch.nextafter(near[7], torch.tensor(float("inf")))
        assert levels(near[None], symmetric_grid(near[None], 8))[0, 7] == (127 if largest > 0 else -128)
