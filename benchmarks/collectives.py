"""Reduce-scatter and all-gather of a flat buffer, torch's and dlo's, over an all-reduce of the same buffer.

    python benchmarks/collectives.py [--ranks 2] [--rounds 10] [--elements 24000000]

On gloo, single precision, one thread a rank; medians of rounds in which all take turns. `all_reduce again` is the A/A
control. The roofline of either is half of a good all-reduce: it does the work of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.testing import run_distributed


def measure(rank: int, world_size: int, elements: int, rounds: int) -> dict[str, list[float]]:
    """Returns each round's seconds, by collective; runs on each rank."""
    communicator = Communicator()
    buffer = torch.randn(elements // world_size * world_size)
    segment = torch.empty(buffer.numel() // world_size)
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(buffer),
        "all_reduce again": lambda: dist.all_reduce(buffer),
        "torch reduce_scatter": lambda: dist.reduce_scatter_tensor(segment, buffer),
        "torch all_gather": lambda: dist.all_gather_into_tensor(buffer, segment),
        "dlo reduce_scatter": lambda: communicator.reduce_scatter(buffer).wait(),
        "dlo all_gather": lambda: communicator.all_gather(buffer).wait(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        buffer.normal_()
        for name, run in runs.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            if number:  # the first round is warm-up
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--elements", type=int, default=24_000_000)
    options = parser.parse_args()
    seconds = run_distributed(measure, options.ranks, options.elements, options.rounds, timeout=600)[0]
    result = {}
    for name, rounds in seconds.items():
        ratio = statistics.median(one / base for one, base in zip(rounds, seconds["all_reduce"], strict=True))
        result[name] = round(ratio, 3)
        print(f"{name:<22}{ratio:>7.2f}")
    print(json.dumps({"benchmark": "collectives", "ranks": options.ranks, "over_all_reduce": result}))


if __name__ == "__main__":
    main()
