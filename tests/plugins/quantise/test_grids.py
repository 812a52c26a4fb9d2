"""The arithmetic of rounding is torchao's: to the bit, in forward and, but for the bounds, in backward."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torchao.quantization import ZeroPointDomain
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantize_config import Float8FakeQuantizeConfig
from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase

from dlo_framework.errors import DloError
from dlo_plugins.quantise.quantised_layers import FakeQuantiser, choose_layers
from dlo_plugins.quantise.schemes import (
    SCHEMES,
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
def test_affine_rounding_is_torchaos_fake_quantiser(dtype, bits: int, kind: torch.dtype, group_size: int) -> None:
    weight, gradient = weights(dtype).requires_grad_(), weights(dtype).roll(1).detach()
    precisions = {"scale_precision": dtype, "zero_point_precision": dtype, "zero_point_domain": ZeroPointDomain.FLOAT}
    config = IntxFakeQuantizeConfig(kind, group_size=group_size, is_symmetric=False, **precisions)
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


INT8, INT4 = SCHEMES["int8"], SCHEMES["int4_weights"]


def vit() -> nn.Module:
    with torch.device("meta"):
        return timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=96, depth=2, num_heads=3)


def test_the_head_stays_and_patterns_cover_modules() -> None:
    found = choose_layers(vit(), INT8, 32, head=("norm", "head"))
    assert found == [f"blocks.{n}.{part}" for n in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    left = choose_layers(vit(), INT8, 32, skip=["blocks.0", "*.*.mlp"], head=("head",))
    assert left == ["blocks.1.attn.qkv", "blocks.1.attn.proj"]


def test_shared_weights_adapters_and_uncalled_projections_stay() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.output = nn.Embedding(10, 32), nn.Linear(32, 10, bias=False)
            self.output.weight = self.embedding.weight
            self.attention, self.inner = nn.MultiheadAttention(32, 4), nn.Linear(32, 32)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 4)})

    assert choose_layers(Net(), INT8, 32) == ["inner"]


@pytest.mark.parametrize(
    ("scheme", "group_size", "options", "message"),
    [
        (INT8, 32, {"skip": ["block.0"]}, "got 'block.0', which matches none; did you mean 'blocks.0'"),
        (INT8, 32, {"skip": ["*"], "head": ("head",)}, "outside its head and skip, got none"),
        (INT4, 128, {"head": ("head",)}, "got 128 for 96 of blocks.0.attn.qkv, .*; set group_size: 32"),
        (INT4, 32, {}, "a multiple of 16 for int4_weights, got 1000 of head; add to skip: head"),
        (INT4, 32, {"head": ("head",), "slices": 2}, "got 32 for 96 / 2 input features of .*; set tp=1"),
    ],
)
def test_what_does_not_fit(scheme, group_size, options, message) -> None:
    with pytest.raises(DloError, match=message):
        choose_layers(vit(), scheme, group_size, **options)


def test_a_row_that_no_group_divides() -> None:
    model = nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 32))
    with pytest.raises(DloError, match="got 32 for 40 of 0; add to skip: 0"):
        choose_layers(model, INT4, 32)
    assert choose_layers(model, INT4, 32, skip=["0"]) == ["1"]


def example() -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(1)
    return nn.Linear(96, 48), torch.randn(4, 7, 96, requires_grad=True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["int8", "int8_weights", "int4_weights", "fp8"])
def test_gradients_are_those_of_the_plain_operations(name: str, autocast: bool) -> None:
    layer, x = example()
    quantiser = FakeQuantiser(SCHEMES[name], 32)
    of_weight, of_input = quantiser.grids(x, layer.weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rounded = x if of_input is None else traced_fake_quantise(x, of_input)
        expected = F.linear(rounded, traced_fake_quantise(layer.weight, of_weight), layer.bias)
        quantiser.install([layer])
        found = layer(x)
    assert found.dtype == expected.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.equal(found, expected)
    gradient = torch.randn_like(found)
    wanted = [x, layer.weight, layer.bias]
    both = (torch.autograd.grad(one, wanted, gradient) for one in (found, expected))
    for ours, plain in zip(*both, strict=True):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, rtol=2**-6 if autocast else 1e-5, atol=2**-6 if autocast else 1e-5)


def test_no_rounded_copy_is_saved_for_backward() -> None:
    layer, x = example()
    FakeQuantiser(SCHEMES["int8"], 32).install([layer])
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        layer(x)
    assert saved == [x.data_ptr()]


def test_compiled_layers_round_from_the_step_on_that_they_are_told_to() -> None:
    torch.compiler.reset()
    layer, x = example()
    compiled = torch.compile(layer, backend="aot_eager")
    plain = compiled(x)
    quantiser = FakeQuantiser(SCHEMES["int4_weights"], 32)
    quantiser.install([layer])
    rounded = compiled(x)
    assert torch.equal(rounded, layer(x))
    assert not torch.equal(rounded, plain)
    quantiser.bits = 8
    assert torch.equal(compiled(x), layer(x))
    assert not torch.equal(compiled(x), rounded)
    quantiser.set_bits([4])
    assert torch.equal(compiled(x), rounded)
    quantiser.remove()
    assert torch.equal(compiled(x), plain)
    torch.compiler.reset()
