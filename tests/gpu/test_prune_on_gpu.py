"""torch's semi-structured kernels compute what the masked dense weights compute."""

import pytest
import torch
from torch import nn

from dlo_framework.errors import DloError
from dlo_plugins.prune.layers import NMPattern, check_kernels, nm_mask, use_sparse_kernels


def test_sparse_kernels_compute_what_dense_ones_do() -> None:
    device = torch.device("cuda")
    check_kernels(device, "bf16-true")
    with pytest.raises(DloError, match="must have weights in half precision"):
        check_kernels(device, "32-true")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.Linear(128, 10))
    net = net.to(device, torch.bfloat16).eval()
    names = ["0.weight", "2.weight", "3.weight"]
    with torch.no_grad():
        for name in names:
            weight = net.get_parameter(name)
            weight.mul_(nm_mask(weight.abs().float(), NMPattern(2, 4), 1))
        batch = torch.randn(64, 128, device=device, dtype=torch.bfloat16)
        dense = net(batch)
        assert use_sparse_kernels(net, names) == 2  # Ten rows have no kernel.
        torch.testing.assert_close(net(batch), dense, atol=2e-2, rtol=2e-2)
