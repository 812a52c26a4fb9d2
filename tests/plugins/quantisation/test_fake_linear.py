"""Layers that round: gradients are autograd's of the same operations, and the layer stays as it was otherwise."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dlo_plugins.quantisation.fake_linear import FakeQuantiser
from dlo_plugins.quantisation.schemes import SCHEMES, traced_fake_quantise


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
    pairs = zip(
        torch.autograd.grad(found, wanted, gradient), torch.autograd.grad(expected, wanted, gradient), strict=True
    )
    for ours, plain in pairs:
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain, rtol=2**-6 if autocast else 1e-5, atol=2**-6 if autocast else 1e-5)


def test_no_rounded_copy_is_saved_for_backward() -> None:
    layer, x = example()
    FakeQuantiser(SCHEMES["int8"], 32).install([layer])
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        layer(x)
    assert saved == [x.data_ptr()]


def test_installing_twice_and_removing() -> None:
    layer, x = example()
    plain, names = layer(x), list(layer.state_dict())
    quantiser = FakeQuantiser(SCHEMES["int4_weights"], 32)
    quantiser.install([layer])
    quantiser.install([layer])
    rounded = layer(x)
    assert not torch.equal(rounded, plain)
    assert list(layer.state_dict()) == names
    quantiser.bits = 8
    assert (layer(x) - plain).abs().mean() < 0.2 * (rounded - plain).abs().mean()
    quantiser.remove()
    assert torch.equal(layer(x), plain)
    assert "forward" not in layer.__dict__


def test_a_forward_of_the_layers_own_comes_back() -> None:
    layer, x = example()
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)
    before = layer(x)
    quantiser = FakeQuantiser(SCHEMES["int8"], 32)
    quantiser.install([layer])
    assert (layer(x) - before).abs().max() > 0.1
    quantiser.remove()
    assert torch.equal(layer(x), before)


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
