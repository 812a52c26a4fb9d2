"""Low-precision products on a GPU: each scheme that the device has is near the layer, and near its emulation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlo_plugins.quantise.low_precision import SCHEMES, LowPrecisionForward


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("tokens", [128, 19])
def test_a_layer_computes_as_its_emulation(scheme: str, tokens: int) -> None:
    device = torch.device("cuda", 0)
    missing = SCHEMES[scheme].lacks(device)
    if missing:
        pytest.skip(f"{scheme}: {missing}")
    torch.manual_seed(0)
    layer = nn.Linear(256, 128, device=device, dtype=torch.bfloat16)
    x, g = (torch.randn(tokens, size, device=device, dtype=torch.bfloat16) for size in (256, 128))
    found = []
    for kernel in ("plain", "device", "emulated"):
        forward = LowPrecisionForward(scheme, emulate=kernel == "emulated" and scheme != "int8")
        if kernel != "plain":
            forward.install(layer)
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        y = layer(inputs)
        y.backward(g)
        assert inputs.grad is not None
        assert layer.weight.grad is not None
        found.append([one.detach().float() for one in (y, inputs.grad, layer.weight.grad)])
        forward.remove()
    for plain, mine, emulated in zip(*found, strict=True):
        assert float((mine - plain).norm() / plain.norm()) < (0.02 if scheme == "int8" else 0.09)
        assert float((mine - emulated).norm() / plain.norm()) < 0.01
