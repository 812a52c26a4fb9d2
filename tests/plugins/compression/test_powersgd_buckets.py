"""PowerSGD where several of DDP's buckets are under way at once."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlo_framework.testing import run_distributed
from dlo_plugins.compression.ddp_hooks import PowerSGD, PowerSGDHook

STEPS = 6


def _train(world_size: int, bucket_mb: float) -> torch.Tensor:
    """Returns the weights of a training whose gradients stand in buckets of so many megabytes."""
    torch.manual_seed(0)
    widths = [96, 384, 96, 288, 96, 384, 96, 192, 96, 384, 96]
    model = nn.Sequential(*[layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())])
    wrapped, steps = DistributedDataParallel(model, bucket_cap_mb=bucket_mb), [0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hook = PowerSGDHook(PowerSGD(names, 2, 2), lambda: steps[0], torch.device("cpu"))
    hook.register(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        wrapped(torch.randn(16, 96, generator=generator)).square().mean().backward()
        optimizer.step()
        steps[0] += 1
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _ranks(rank: int, world_size: int) -> Any:
    return [_train(world_size, 0.05) for _ in range(2)]


def test_messages_of_buckets_are_not_mixed() -> None:
    """All ranks come to the same weights, and so does the same training again."""
    found = run_distributed(_ranks, 2, timeout=200)
    for of_rank in found:
        for weights in of_rank:
            assert weights.isfinite().all()
            torch.testing.assert_close(weights, found[0][0], rtol=0, atol=0)
