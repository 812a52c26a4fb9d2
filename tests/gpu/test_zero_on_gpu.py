"""The engine on one accelerator: copies to and from the CPU run beside the computation, and nothing is lost in them."""

import os

import pytest
import torch
from torch import nn

from dlo_framework.distributed.collectives import Communicator
from dlo_plugins.parallel.zero.zero_engine import ZeroEngine, ZeroOptions

CASES = [
    (1, {}),
    (2, {"offload_optimizer": True}),
    (3, {}),
    (3, {"offload_optimizer": True, "offload_parameters": True}),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]
    return nn.Sequential(nn.Linear(64, 512), *blocks, nn.Linear(512, 10)).cuda()


@pytest.mark.parametrize(("stage", "options"), CASES)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("collectives", [False, True], ids=["alone", "NCCL for real"])
def test_an_engine_on_one_device_is_the_plain_loop(
    group, stage, options, micro_batches, collectives, monkeypatch
) -> None:
    assert "CUDA_LAUNCH_BLOCKING" not in os.environ  # It would hide a missing wait.
    monkeypatch.setattr(Communicator, "skips_alone", not collectives)
    plain, divided = model(), model()
    # With a smaller eps Adam makes whole steps of the rounding of gradients that cancel to nothing.
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, eps=1e-5)
    optimizer = torch.optim.AdamW(divided.parameters(), lr=1e-3, eps=1e-5)
    units = [str(number) for number in range(1, 7)]
    settings = ZeroOptions(stage, 1_000_000, **options)
    engine = ZeroEngine(divided, [optimizer], units, Communicator(), torch.device("cuda", 0), settings)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(8):
        for number in range(micro_batches):
            x = torch.randn(32, 64, device="cuda", generator=generator)
            (plain(x).square().mean() / micro_batches).backward()
            engine.sync = number == micro_batches - 1
            loss = divided(x).square().mean() / micro_batches
            engine.before_backward(automatic=True)
            loss.backward()
            engine.after_backward(automatic=True)
        for one in (reference, optimizer):
            one.step()
            one.zero_grad()
    engine.dissolve()
    for expected, found in zip(plain.parameters(), divided.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
