"""ZeRO and FSDP beside plain training of the same Llama in bf16, on one device and on all."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measuring.record import Table
from measuring.rounds import DeviceClock, RanksClock, all_ratios, take_turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from on_accelerator.subjects import BATCHES, SIZES, build_network, draw_weights_on, llama, pinned
from on_accelerator.training import Trained, Work, by_dlo, by_hand

BASE = "DDP"


def strategies_table(size: str, device_type: str, ranks: int, rounds: int) -> Table:
    """Measures strategies on ``ranks`` ranks, each with its own device on an accelerator."""
    backend = dist.get_default_backend_for_device(device_type)
    found = run_distributed(
        measure, ranks, size, device_type, rounds, backend=backend, timeout=1800, group_timeout=300
    )  # fmt: skip
    subject = llama(SIZES[size], device_type != "cpu", divided=True)
    many = f"{ranks} rank{'s' if ranks > 1 else ''}"
    title = f"strategies on {many}: {subject.title}, bf16"
    clock = "elapsed time" if device_type == "cpu" else "events on the first rank's device"
    table = Table(title, "the tokens per second of torch's DDP by hand", clock, better="higher")
    rates = {name: [ranks * subject.items / turn.seconds for turn in turns] for name, turns in found[0].items()}
    for name, values in all_ratios(rates, BASE).items():
        held = [turn.peak_bytes for of_rank in found for turn in of_rank[name] if turn.peak_bytes is not None]
        columns: dict[str, Any] = {
            "tokens a second": statistics.median(rates[name]),
            "peak GB a rank": max(held) / 1e9 if held else None,
        }
        table.add(name, values, ours=name.startswith("dlo"), control=name.endswith("again"), **columns)
    return table


def measure(rank: int, world_size: int, size: str, device_type: str, rounds: int) -> dict[str, list[Trained]]:
    """Returns what each turn found, by contestant; runs on each rank."""
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device(device_type, rank)
        torch.accelerator.set_device_index(rank)
    torch.manual_seed(rank)
    shape = SIZES[size]
    subject = llama(shape, device_type != "cpu", divided=True)
    clock = RanksClock(device) if device_type == "cpu" else DeviceClock(device)
    batches = [pinned(subject.batch(), device) for _ in range(BATCHES)]
    work = Work(device, clock, batches, shape.warm, shape.steps)
    index = [rank] if device_type != "cpu" else None

    def wrapped(net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net, device_ids=index)

    def divided(net: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device_type, (world_size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in net.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        return net

    def fitted(strategy: Any) -> Trained:
        return by_dlo(subject, draw_weights_on(device, subject.task()), work, [], strategy=strategy, devices=world_size)

    runs: dict[str, Callable[[], Trained]] = {
        BASE: lambda: by_hand(subject, build_network(device, subject.net), work, wrapped),
        f"{BASE} again": lambda: by_hand(subject, build_network(device, subject.net), work, wrapped),
        "FSDP2": lambda: by_hand(subject, build_network(device, subject.net), work, divided, autocast=False),
    }
    if world_size == 1:
        runs["loop, no strategy"] = lambda: by_hand(subject, build_network(device, subject.net), work)
    makers: dict[str, Callable[[], Any]] = {
        "ddp": lambda: "ddp",
        "zero1": lambda: ZeroStrategy(1),
        "zero2": lambda: ZeroStrategy(2),
        "zero3": lambda: ZeroStrategy(3),
        "fsdp": FSDPStrategy,
    }
    runs |= {f"dlo {name}": (lambda make=make: fitted(make())) for name, make in makers.items()}
    return take_turns(runs, rounds, order=random.Random(0))
