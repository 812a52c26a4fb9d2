"""Codes and scales are the nearest levels, and a 4-bit layer computes as a linear layer with the dequantised weight."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dlo_framework.errors import DloError
from dlo_framework.models.four_bit_linear import (
    LEVELS,
    FourBitLinear,
    dequantise,
    dequantise_scales,
    quantise,
    quantise_scales,
)


@pytest.mark.parametrize("kind", list(LEVELS))
def test_each_weight_has_the_nearest_level(kind: Any) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 32)
    weight[2, 8:16] = 0
    codes, scales = quantise(weight, kind, 8)
    assert (codes.shape, codes.dtype, scales.shape) == ((6, 16), torch.uint8, (6, 4))
    found = dequantise(codes, scales, kind, torch.float32)
    per_weight = scales.float().repeat_interleave(8, dim=1)
    choices = per_weight[..., None] * torch.tensor(LEVELS[kind])  # [out, in, 16]
    nearest = choices.gather(-1, (choices - weight[..., None]).abs().argmin(-1, keepdim=True))[..., 0]
    torch.testing.assert_close((found - weight).abs(), (nearest - weight).abs(), rtol=0, atol=1e-7)
    assert not found[2, 8:16].any()


def test_levels_of_nf4_are_those_of_bitsandbytes() -> None:
    import bitsandbytes.functional  # Here: its import takes seconds.

    expected = bitsandbytes.functional.get_4bit_type("nf4", device="cpu").data
    torch.testing.assert_close(torch.tensor(LEVELS["nf4"]), expected, rtol=0, atol=0)


def test_the_error_of_double_quantisation_is_that_of_bitsandbytes() -> None:
    import bitsandbytes.functional

    torch.manual_seed(0)
    weight = torch.randn(64, 1024) * torch.rand(64, 1).add(0.2)  # Rows of different sizes.
    weight[3, :64], weight[4] = 0, 0
    options: dict[str, Any] = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": True}
    packed, state = bitsandbytes.functional.quantize_4bit(weight, **options)
    theirs = (bitsandbytes.functional.dequantize_4bit(packed, state) - weight).square().mean()
    linear = nn.Linear(1024, 64, bias=False)
    linear.weight.data = weight
    layer = FourBitLinear.from_linear("layer", linear, "nf4", 64, double=True)
    ours = (layer.weight - weight).square().mean()
    assert float(ours) <= 1.005 * float(theirs)
    assert not layer.weight[3, :64].any()
    assert not layer.weight[4].any()
    once = (FourBitLinear.from_linear("layer", linear, "nf4", 64).weight - weight).square().mean()
    assert float(ours) == pytest.approx(float(once), rel=5e-3)
    scales = quantise(weight, "nf4", 64)[1]
    codes, ranges = quantise_scales(scales)
    step = (ranges[:, 1:] - ranges[:, :1]).float() / 255
    error = (dequantise_scales(codes, ranges) - scales.float()).abs()
    assert bool((error <= 0.501 * step + 2**-8 * scales.float()).all())  # The range itself is rounded to bf16.
    assert sum(p.nbytes for p in layer.parameters()) / weight.numel() * 8 == 4 + 8 / 64 + 32 / 1024


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_input_gradients_are_those_of_the_dequantised_layer(autocast: bool, double: bool) -> None:
    torch.manual_seed(0)
    layer = FourBitLinear.from_linear("layer", nn.Linear(32, 12), "nf4", 16, double)
    plain = layer.to_linear()
    assert torch.equal(plain.weight, layer.weight)
    results = []
    for module in (layer, plain):
        x = torch.linspace(-1, 1, 96).view(3, 32).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(x)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if autocast else {}
    assert results[0][0].dtype == results[1][0].dtype
    torch.testing.assert_close(results[0], results[1], **tolerance)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_compiled_forward_keeps_the_codes_alone(recomputed: bool) -> None:
    layer = FourBitLinear.from_linear("layer", nn.Linear(64, 96, bias=False), "nf4", 64)

    def block(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)

    compiled = torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)
    saved: list[torch.Tensor] = []
    x = torch.randn(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = compiled(x)
    y.square().sum().backward()
    assert not any(tensor.shape == (96, 64) for tensor in saved)
    assert any(tensor.dtype == torch.uint8 for tensor in saved)
    other = x.detach().requires_grad_()
    layer(other).square().sum().backward()
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]


def test_a_block_that_does_not_divide_the_inputs_is_refused() -> None:
    with pytest.raises(DloError, match=r"base_block must be even and divide the 48 .*, got 64; .*16"):
        FourBitLinear.from_linear("up", nn.Linear(48, 8), "nf4", 64)
