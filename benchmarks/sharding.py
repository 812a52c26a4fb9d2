"""A training step of each way to divide a model's state, beside its peers, and the bytes each rank holds.

    python benchmarks/sharding.py [--ranks 2] [--rounds 20] [--deepspeed] [--device cuda]

Each rank builds all variants of one model (a GPT-like transformer in single precision, 23 million parameters by
default) under AdamW, and steps them in the same order; `ddp again` is the A/A control. Elapsed time, for the ranks wait
for each other. The bytes are those of parameters, gradients and optimizer state that live between steps (gradients:
after backward), on the rank that holds the most, and what the ZeRO paper's formula (arXiv 1910.02054) gives. Losses
must equal DDP's.

The roofline of stages 1 and 2 is DDP's own step: the same 2 psi elements pass between the ranks. Stage 3 passes half
as many again.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, RanksClock, all_ratios, take_turns
from measuring.transformer import LENGTH, VOCABULARY, Transformer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.local_memory import memory_of, optimizer_bytes
from dlo_framework.testing import run_distributed
from dlo_framework.watch.state_bytes import paper_bytes
from dlo_plugins.parallel.zero.zero_engine import ZeroEngine, ZeroOptions

MIB = 2**20
WARM_UP = 2
#: What is to be reached on CPUs: a step over DDP's.
BARS = {"dlo zero1": 1.05, "dlo zero2": 1.05, "dlo zero3": 1.15}


@dataclass
class Variant:
    """One way to train.

    Attributes:
        step: Function that takes a batch, steps, and returns the loss.
        bytes: Size of the state that this rank holds.
    """

    step: Callable[[Tensor], Tensor]
    bytes: Callable[[], dict[str, int]]


def build(options: argparse.Namespace, device: torch.device) -> Transformer:
    return Transformer(options.width, options.depth).to(device)


def plain(model: nn.Module, parameters: list[Tensor], optimizer: torch.optim.Optimizer, wrapped: nn.Module) -> Variant:
    """Returns the usual loop."""
    held = {"gradients": 0}

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = wrapped(batch)
        loss.backward()
        if not held["gradients"]:
            held["gradients"] = memory_of(p.grad for p in parameters if p.grad is not None)
        optimizer.step()
        return loss.detach()

    return Variant(
        step, lambda: {"parameters": memory_of(parameters), **held, "optimizer": optimizer_bytes([optimizer])}
    )


def ddp(options: argparse.Namespace, device: torch.device) -> Variant:
    model = build(options, device)
    wrapped = DistributedDataParallel(model)
    return plain(model, list(model.parameters()), torch.optim.AdamW(model.parameters(), lr=1e-4), wrapped)


def redundancy(options: argparse.Namespace, device: torch.device) -> Variant:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = build(options, device)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    variant = plain(model, list(model.parameters()), optimizer, DistributedDataParallel(model))
    return Variant(variant.step, lambda: {**variant.bytes(), "optimizer": optimizer_bytes([optimizer.optim])})


def fsdp2(options: argparse.Namespace, device: torch.device, reshard: bool) -> Variant:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build(options, device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return plain(model, list(model.parameters()), torch.optim.AdamW(model.parameters(), lr=1e-4), model)


def zero(options: argparse.Namespace, device: torch.device, stage: int, offload: bool = False) -> Variant:
    model = build(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings = ZeroOptions(stage, int(25 * MIB / 4), offload_optimizer=offload)
    units = [f"blocks.{number}" for number in range(options.depth)]
    engine = ZeroEngine(model, [optimizer], units, Communicator(), device, settings)
    held: dict[str, int] = {}

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch)
        engine.before_backward(automatic=True)
        loss.backward()
        engine.after_backward(automatic=True)
        if not held:
            held.update(engine.count_state_bytes())
        optimizer.step()
        return loss.detach()

    return Variant(step, lambda: {**held, "optimizer": optimizer_bytes([optimizer])})


def deepspeed(options: argparse.Namespace, device: torch.device, stage: int) -> Variant:
    import deepspeed as ds

    model = build(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: Tensor) -> Tensor:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Variant(step, lambda: {"optimizer": optimizer_bytes([optimizer])})


def variants(options: argparse.Namespace) -> dict[str, Callable[[argparse.Namespace, torch.device], Variant]]:
    found: dict[str, Callable[[argparse.Namespace, torch.device], Variant]] = {
        "ddp": ddp,
        "ddp again": ddp,
        "ZeroRedundancyOptimizer": redundancy,
        "FSDP2": lambda o, d: fsdp2(o, d, True),
        "FSDP2, no reshard": lambda o, d: fsdp2(o, d, False),
        "dlo zero1": lambda o, d: zero(o, d, 1),
        "dlo zero2": lambda o, d: zero(o, d, 2),
        "dlo zero3": lambda o, d: zero(o, d, 3),
    }
    if options.deepspeed:
        for stage in (1, 2, 3):
            found[f"DeepSpeed {stage}"] = lambda o, d, stage=stage: deepspeed(o, d, stage)
    return found


def measure(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns seconds of each round, the losses, and the bytes, by variant; runs on each rank."""
    if options.deepspeed:
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    device = torch.device("cuda", rank % torch.cuda.device_count()) if options.device == "cuda" else torch.device("cpu")
    built = {name: make(options, device) for name, make in variants(options).items()}
    losses: dict[str, list[float]] = {name: [] for name in built}
    clock, now = RanksClock(device), {}

    def new_batch(number: int) -> None:
        generator = torch.Generator().manual_seed(number * world_size + rank)
        now["batch"] = torch.randint(VOCABULARY, (options.batch, LENGTH), generator=generator).to(device)

    def timed(name: str) -> float:
        found: list[Tensor] = []
        seconds = clock.seconds(lambda: found.append(built[name].step(now["batch"])))
        losses[name].append(float(found[0]))
        return seconds

    runs = {name: (lambda name=name: timed(name)) for name in built}
    seconds = take_turns(runs, options.rounds, warm_up=WARM_UP, order=random.Random(0), before_round=new_batch)
    return {"seconds": seconds, "losses": losses, "bytes": {name: variant.bytes() for name, variant in built.items()}}


def table(ranks: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Returns the table of what all ranks measured."""
    psi = sum(p.numel() for p in build(options, torch.device("cpu")).parameters())
    found = Table(f"a step of {psi / 1e6:.1f} million parameters on {options.ranks} ranks", "DDP's step", ELAPSED)
    found.notes.append("MB a rank: parameters, gradients and optimizer state; the formula is the paper's.")
    seconds = ranks[0]["seconds"]
    for name, values in all_ratios(seconds, "ddp").items():
        off = max(
            abs(a - b) / abs(b)
            for rank in ranks
            for a, b in zip(rank["losses"][name], rank["losses"]["ddp"], strict=True)
        )
        held = max((rank["bytes"][name] for rank in ranks), key=lambda of_rank: sum(of_rank.values()))
        stage = 3 if "FSDP" in name else 1 if "Redundancy" in name else int(name[-1]) if name[-1].isdigit() else 0
        parts = paper_bytes(psi, options.ranks, stage)
        # DeepSpeed does not tell what it holds of parameters and gradients.
        known = {part: held[part] / 1e6 for part in ("parameters", "gradients", "optimizer") if part in held}
        found.add(
            name,
            values,
            bar=BARS.get(name) if options.device == "cpu" and options.ranks > 1 else None,
            ours=name.startswith("dlo"),
            control=name == "ddp again",
            ms=statistics.median(seconds[name]) * 1e3,
            MB=sum(known.values()) if len(known) == 3 else None,
            formula_MB=(parts.parameters + parts.gradients + parts.optimizer) / 1e6,
            losses_apart=f"{off:.0e}",
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--deepspeed", action="store_true")
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options, options.device)
    if options.deepspeed and not importlib.util.find_spec("deepspeed"):
        record.without("DeepSpeed, stages 1 to 3", "deepspeed is not installed")
        options.deepspeed = False
    backend = "nccl" if options.device == "cuda" else "gloo"
    ranks = run_distributed(measure, options.ranks, options, timeout=3600, group_timeout=600, backend=backend)
    record.add(table(ranks, options))
    record.finish()


if __name__ == "__main__":
    main()
