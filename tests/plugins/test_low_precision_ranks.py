"""Under tensor parallelism products round as in one process."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.testing import run_distributed
from dlo_plugins.quantise.low_precision import LowPrecisionForward

SCHEMES = ("int8", "fp8", "fp8_rowwise")


def _step(layer: nn.Linear, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Returns the output, and the gradients of input and weight."""
    given = x.clone().requires_grad_()
    y = layer(given)
    y.backward(gradient)
    assert given.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), given.grad, layer.weight.grad]


def _layer(scheme: str, weight: Tensor, sliced: Any = None, group: str = "") -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight.clone())
    LowPrecisionForward(scheme, emulate=scheme != "int8").install(layer, sliced, group)
    return layer


def _slices(rank: int, world_size: int) -> None:
    """Checks that the slices of a layer compute what the full layer does, but not with scales of their own."""
    torch.manual_seed(0)
    weight, x, gradient = torch.randn(48, 64) * torch.logspace(-1, 1, 64), torch.randn(9, 64), torch.randn(9, 48)
    gradient = gradient * torch.logspace(-1, 1, 48)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for scheme, dim, shared in itertools.product(SCHEMES, (0, 1), (True, False)):
        half, own = weight.shape[dim] // 2, [slice(None), slice(None)]
        own[dim] = slice(rank * half, (rank + 1) * half)
        rows, columns = own
        full = _step(_layer(scheme, weight), x, gradient)
        expected = [full[0][:, rows], full[1][:, columns], full[2][rows, columns]]
        cut: Any = (dim, name) if shared else (None, "")
        mine = _step(_layer(scheme, weight[rows, columns], *cut), x[:, columns], gradient[:, rows])
        dist.all_reduce(mine[1 - dim])  # Partial sums: of the input's gradient, or of the output.
        apart = [float((one - other).norm() / other.norm()) for one, other in zip(mine, expected, strict=True)]
        if shared:
            assert max(apart) < 1e-6, (scheme, dim, apart)
        elif scheme != "fp8_rowwise":  # Its scales are powers of two, which change the rounding of tiny values alone.
            assert max(apart) > 1e-4, (scheme, dim, apart)


def test_slices_round_as_one_process() -> None:
    run_distributed(_slices, 2)
