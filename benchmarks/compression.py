"""A training step of each way to compress communication, beside plain data parallelism, and the bytes each rank sends.

    python benchmarks/compression.py [--ranks 2] [--rounds 20] [--device cuda] [--mbit 100]

Each rank trains a GPT-like transformer in single precision (benchmarks/sharding.py's; 10 million parameters by default)
in DistributedDataParallel, and steps all variants in the same order; `ddp again` is the A/A control. Elapsed time, for
the ranks wait for each other.

Bytes are those that a rank sends to others in a step, an all-reduce as a reduce-scatter and an all-gather. Two ranks on
one machine have a network as fast as its memory, on which compression can only lose: its own time is what is measured.
What a slow network makes of it is computed, and said to be: the last column is the step over DDP's where each rank
sends at ``--mbit`` and nothing overlaps, (time without DDP's own exchange + bytes / speed) of both.

The roofline: no variant sends fewer bytes than 1/32 of DDP's and scales; none is faster than backward and step alone
(`no exchange`).
"""

from __future__ import annotations

import argparse
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
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dlo_framework.testing import run_distributed
from dlo_plugins.compression.compressed_all_reduce import CompressedAllReduce
from dlo_plugins.compression.ddp_hooks import GradientHook, HalfHook, OneBitHook, PowerSGD, PowerSGDHook
from dlo_plugins.compression.one_bit import OneBitAdam, OneBitLamb

#: Steps before a variant compresses, and that are not measured.
WARM_UP = 3
#: What is to be reached: bytes sent over DDP's.
SENT_BARS = {"1-bit Adam": 0.2}


@dataclass
class Variant:
    """One way to train.

    Attributes:
        step: Function that takes a batch and steps.
        bytes: Function that returns the bytes that this rank has sent so far.
    """

    step: Callable[[Tensor], None]
    bytes: Callable[[], float]


class NoExchange(GradientHook):
    """Leaves gradients as they are: what a step takes without its exchange."""

    def share(self, bucket: Any) -> float:
        return 0.0

    def reduce(self, bucket: Any) -> Any:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


def build(options: argparse.Namespace, device: torch.device, method: str) -> Variant:
    model = Transformer(options.width, options.depth).to(device)
    parameters, steps = list(model.parameters()), [0]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    reduce: CompressedAllReduce | None = None
    if method in ("1-bit Adam", "1-bit LAMB"):
        kind = OneBitAdam if method == "1-bit Adam" else OneBitLamb
        optimizer = kind(parameters, lr=1e-4, freeze_step=WARM_UP - 1)
        optimizer.communicator = reduce = CompressedAllReduce()
    wrapped = DistributedDataParallel(model)
    makers: dict[str, Callable[[], GradientHook]] = {
        "no exchange": NoExchange,
        "bf16": lambda: HalfHook(torch.bfloat16),
        "fp16": lambda: HalfHook(torch.float16),
        "PowerSGD": lambda: PowerSGDHook(
            PowerSGD({id(p): n for n, p in model.named_parameters()}, 1, WARM_UP - 1), lambda: steps[0], device
        ),
        "1-bit Adam": lambda: OneBitHook(optimizer),  # type: ignore[arg-type]
        "1-bit LAMB": lambda: OneBitHook(optimizer),  # type: ignore[arg-type]
    }
    hook = makers[method]() if method in makers else None
    if hook is not None:
        hook.register(wrapped)
    whole = 2 * sum(p.nbytes for p in parameters) * (dist.get_world_size() - 1) / dist.get_world_size()

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        wrapped(batch).backward()
        optimizer.step()
        steps[0] += 1

    def sent() -> float:
        of_gradients = whole * steps[0] if hook is None else hook.bytes_sent
        return of_gradients + (0 if reduce is None else reduce.bytes_sent)

    return Variant(step, sent)


METHODS = ("ddp", "ddp again", "no exchange", "bf16", "fp16", "PowerSGD", "1-bit Adam", "1-bit LAMB")


def measure(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns seconds of each round, and the bytes of a step, by variant; runs on each rank."""
    device = torch.device("cuda", rank % torch.cuda.device_count()) if options.device == "cuda" else torch.device("cpu")
    built = {method: build(options, device, method) for method in METHODS}
    before: dict[str, float] = {}
    clock, now = RanksClock(device), {}

    def new_batch(number: int) -> None:
        generator = torch.Generator().manual_seed(number * world_size + rank)
        now["batch"] = torch.randint(VOCABULARY, (options.batch, LENGTH), generator=generator).to(device)
        if number == WARM_UP:
            before.update({method: built[method].bytes() for method in METHODS})

    runs = {method: (lambda step=built[method].step: clock.seconds(lambda: step(now["batch"]))) for method in METHODS}
    seconds = take_turns(runs, options.rounds, warm_up=WARM_UP, order=random.Random(0), before_round=new_batch)
    sent = {method: (built[method].bytes() - before[method]) / options.rounds for method in METHODS}
    return {"seconds": seconds, "bytes": sent}


def tables(found: dict[str, Any], options: argparse.Namespace) -> list[Table]:
    """Returns the tables of time, and of bytes."""
    seconds, sent = found["seconds"], found["bytes"]
    psi = sum(p.numel() for p in Transformer(options.width, options.depth).parameters())
    alone = statistics.median(seconds["no exchange"])
    # What compressing takes is in the measured time; DDP's own exchange in memory is not part of a network's.
    own = {method: max(alone, statistics.median(of_method)) for method, of_method in seconds.items()}
    own |= {"ddp": alone, "ddp again": alone, "no exchange": alone}
    speed = options.mbit * 1e6 / 8
    slow = {method: own[method] + sent[method] / speed for method in METHODS}
    what = f"{psi / 1e6:.1f} million parameters on {options.ranks} ranks"
    time, size = Table(f"a step: {what}", "DDP's step", ELAPSED), Table(f"sent by a rank: {what}", "DDP's", "bytes")
    time.notes.append(f"At {options.mbit:g} Mbit/s: computed from the time without an exchange and the bytes.")
    for method, values in all_ratios(seconds, "ddp").items():
        ours, control = method not in ("ddp", "ddp again", "no exchange"), method == "ddp again"
        computed = {f"at_{options.mbit:g}_Mbit/s": slow[method] / slow["ddp"]}
        time.add(method, values, ours=ours, control=control, ms=statistics.median(seconds[method]) * 1e3, **computed)
        share = sent[method] / sent["ddp"]
        size.add(method, [share], bar=SENT_BARS.get(method), ours=ours, control=control, MB=sent[method] / 1e6)
    return [time, size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=1000.0, help="of the network that the last column is about")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parse_options(parser, __file__)
    backend = "nccl" if options.device == "cuda" else "gloo"
    record = Record.of(__file__, __doc__, options, options.device)
    ranks = run_distributed(measure, options.ranks, options, timeout=3600, group_timeout=600, backend=backend)
    for table in tables(ranks[0], options):
        record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
