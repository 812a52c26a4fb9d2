"""torch's fused steps: taken by default where nobody chose otherwise, with clipping, and across checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_framework.distributed.optimizer_steps import prefer_fused
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.fsdp_nets import Module, differ, fit
from support.on_ranks import on_ranks

MAKERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 5), (3,), (), (0,))]


@pytest.mark.parametrize("name", MAKERS)
def test_a_fused_step_gives_the_numbers_of_the_loop(name: str) -> None:
    """Also to a parameter that gets its first gradient later than others, at which torch's fused SGD raises."""
    steps = []
    for fused in (False, True):
        held = parameters()
        optimizer = MAKERS[name](held)
        if fused:
            prefer_fused(optimizer, on_cpu=True)
            assert all(group["fused"] for group in optimizer.param_groups)
        for step in range(5):
            for number, parameter in enumerate(held):
                late = number == 1 and step == 0
                parameter.grad = None if late else torch.full_like(parameter, 0.3 + step)
            optimizer.step()
        steps.append(held)
    for one, other in zip(*steps, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=False),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
        lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1),
        lambda p: torch.optim.Adam([p[0], nn.Parameter(torch.ones(2, dtype=torch.complex64))]),
        lambda p: torch.optim.RMSprop(p),
    ],
)
def test_what_a_user_chose_and_what_has_no_fused_step_stays(make: Any) -> None:
    optimizer = make(parameters())
    before = [dict(group) for group in optimizer.param_groups]
    prefer_fused(optimizer, on_cpu=True)
    assert [group.get("fused") for group in optimizer.param_groups] == [group.get("fused") for group in before]


def test_on_cuda_it_is_the_default() -> None:
    with FakeTensorMode():
        held = [nn.Parameter(torch.empty(3, device="cuda", dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
        for make in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
            optimizer = make(held, lr=0.1)
            prefer_fused(optimizer)
            assert optimizer.param_groups[0]["fused"] is True


def test_in_the_cpu_s_memory_it_is_for_offloaded_shards_and_never_for_sparse_gradients() -> None:
    for options in ({}, {"module": nn.Embedding(3, 2, sparse=True), "on_cpu": True}):
        optimizer = torch.optim.SGD(parameters(), lr=0.1)
        prefer_fused(optimizer, **options)
        assert optimizer.param_groups[0]["fused"] is None


class OnDevice(ZeroStrategy):
    """ZeRO whose ranks' device is not the memory that it offloads to."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)


class Fused(Module):
    """Its user asks for the fused step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=self.rate, eps=1e-5, weight_decay=0.1, fused=True)


STRATEGIES: dict[str, Any] = {
    "one device": lambda: "auto",
    "ddp": DataParallelStrategy,
    "zero2": lambda: OnDevice(2, offload="optimizer"),
    "zero3": lambda: OnDevice(3, offload="both"),
    "fsdp": FSDPStrategy,
}


def run(strategy: str, module: Module, **options: Any) -> Any:
    return fit(0, 1, module, STRATEGIES[strategy](), callbacks=[ExactResume()], **options)


@on_ranks(1)
def test_it_is_clipped_under_autocast(rank: int, world_size: int) -> None:
    for name in STRATEGIES:
        options = {"precision": "bf16-mixed", "gradient_clip_val": 0.1}
        both = [gather_full_weights(run(name, kind(), **options)) for kind in (Fused, Module)]
        assert differ(*both) < 1e-5, name


@on_ranks(1)
def test_it_goes_on_from_any_checkpoint(rank: int, world_size: int, folder: Path) -> None:
    whole = gather_full_weights(run("one device", Module()))
    for first, second in (("one device", "zero2"), ("zero2", "one device"), ("zero3", "fsdp"), ("fsdp", "zero2")):
        path = folder / f"{first}-{second}"
        run(first, Module(), max_steps=2).save_checkpoint(path)
        resumed = run(second, Module(), resume=path)
        fused = {bool(group["fused"]) for group in resumed.strategy.optimizers[0].param_groups}
        assert fused == {second == "zero2"}, path
        assert differ(gather_full_weights(resumed), whole) < 1e-5, path
