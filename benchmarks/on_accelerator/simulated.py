"""One rank of many on one device: torch's fake process group, whose collectives do nothing and take no time.

What is left is what each rank does by itself: the memory that it holds, and the time that its host takes to launch a
step. Weights and losses are none, since nothing arrives.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from measuring.record import Table
from measuring.rounds import all_ratios, take_turns
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.distributed.model_units import find_units
from dlo_framework.mesh import MeshSpec
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.fsdp.sharded_optimizers import OptimizerShards
from dlo_plugins.parallel.fsdp.sharding import ShardedModule
from dlo_plugins.parallel.zero.zero_engine import ZeroEngine, ZeroOptions
from on_accelerator.subjects import SIZES, Subject, llama
from support.python_calls import count_python_calls

BASE, HALF = "loop, no strategy", torch.bfloat16
RANKS = 8


@dataclass(frozen=True)
class Simulated:
    """What a rank of many took.

    Attributes:
        seconds: Time in which the host launches a step.
        calls: Number of calls of Python functions in a step.
        held_bytes: Memory held between steps; None where the device does not count.
        peak_bytes: Peak memory of a step; None where the device does not count.
    """

    seconds: float
    calls: int
    held_bytes: int | None
    peak_bytes: int | None


def simulated_table(size: str, device: torch.device, rounds: int) -> Table:
    """Measures the first of eight ranks under each strategy that divides a model, beside a loop on the full one."""
    shape = SIZES[size]
    subject = llama(shape, device.type != "cpu", divided=True)
    with rank_0_of(RANKS):
        makers = {BASE: _loop, f"{BASE} again": _loop, "FSDP2": _fsdp2, "dlo fsdp": _fsdp}
        makers |= {f"dlo zero{stage}": (lambda *a, stage=stage: _zero(stage, *a)) for stage in (1, 2, 3)}
        runs = {
            name: (lambda make=make: _measure(subject, make, device, shape.warm, shape.steps))
            for name, make in makers.items()
        }
        found = take_turns(runs, rounds, order=random.Random(0))
    table = Table(
        f"the first of {RANKS} ranks, by a fake group: {subject.title}, bf16",
        "the host's time for a step of a loop without a strategy",
        "elapsed time of the host until a step is launched" if device.type != "cpu" else "elapsed time of a step",
    )
    for name, ratios in all_ratios({n: [turn.seconds for turn in turns] for n, turns in found.items()}, BASE).items():
        last = found[name][-1]
        columns: dict[str, Any] = {
            "ms a step": statistics.median(turn.seconds for turn in found[name]) * 1e3,
            "Python calls a step": last.calls,
            "GB between steps": None if last.held_bytes is None else last.held_bytes / 1e9,
            "peak GB": None if last.peak_bytes is None else last.peak_bytes / 1e9,
        }
        table.add(name, ratios, ours=name.startswith("dlo"), control=name.endswith("again"), **columns)
    return table


@contextlib.contextmanager
def rank_0_of(ranks: int) -> Iterator[None]:
    """Makes this process the first of `ranks` ranks, inside the block."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measure(subject: Subject, make: Callable[..., Any], device: torch.device, warm: int, steps: int) -> Simulated:
    torch.manual_seed(0)
    on_device = device.type != "cpu"
    before = torch.accelerator.memory_allocated() if on_device else 0
    with device:
        step, batch = make(subject, subject.net().to(device), device), subject.batch()
    batch = {key: value.to(device) for key, value in batch.items()}
    for _ in range(warm):
        step(batch)
    held = peak = None
    if on_device:
        torch.accelerator.synchronize()
        held = torch.accelerator.memory_allocated() - before
        torch.accelerator.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - begin)
        if on_device:
            torch.accelerator.synchronize()
    if on_device:
        peak = torch.accelerator.max_memory_allocated() - before
    return Simulated(statistics.median(seconds), count_python_calls(lambda: step(batch)), held, peak)


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def _loop(subject: Subject, net: nn.Module, device: torch.device) -> Callable[[Any], None]:
    optimizer = _optimizer(net)

    def step(batch: Any) -> None:
        with torch.autocast(device.type, HALF):
            loss = subject.loss(net, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fsdp2(subject: Subject, net: Any, device: torch.device) -> Callable[[Any], None]:
    mesh = init_device_mesh(device.type, (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
    for layer in [*net.model.layers, net]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = _optimizer(net)

    def step(batch: Any) -> None:
        subject.loss(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _zero(stage: int, subject: Subject, net: nn.Module, device: torch.device) -> Callable[[Any], None]:
    optimizer = _optimizer(net)
    options = ZeroOptions(stage, 25 * 2**18, gathered_dtype=HALF)
    engine = ZeroEngine(net, [optimizer], find_units(net), Communicator(), device, options)

    def step(batch: Any) -> None:
        with torch.autocast(device.type, HALF):
            loss = subject.loss(net, batch)
        engine.before_backward(automatic=True)
        loss.backward()
        engine.after_backward(automatic=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fsdp(subject: Subject, net: nn.Module, device: torch.device) -> Callable[[Any], None]:
    groups = MeshGroups(MeshSpec(dp_shard=RANKS), device.type)
    options = FullyShard(param_dtype="bfloat16").options("bf16-mixed", groups.spec, device, net)
    sharded = ShardedModule(net, find_units(net), groups, device, options, seed=0)
    optimizer = _optimizer(net)
    shares = OptimizerShards([optimizer], sharded)
    names = set(sharded.parameters)

    def step(batch: Any) -> None:
        shares.drop_gradients(lambda share: True)
        with torch.autocast(device.type, HALF):
            loss = sharded.call(lambda: subject.loss(net, batch))
        loss.backward()
        shares.set_grads(names)
        optimizer.step()
        optimizer.zero_grad()

    return step
