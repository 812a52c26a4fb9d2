"""Reduce-scatter and all-gather of a flat buffer, torch's and dlo's, over an all-reduce of the same buffer.

    python benchmarks/collectives.py [--ranks 2] [--rounds 10] [--elements 24000000]

On gloo, single precision, one thread a rank. `all_reduce again` is the A/A control. The roofline of either is half of a
good all-reduce: it does the work of both.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, RanksClock, all_ratios, take_turns

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
    clock = RanksClock(torch.device("cpu"))
    timed = {name: (lambda run=run: clock.seconds(run)) for name, run in runs.items()}
    return take_turns(timed, rounds, order=random.Random(0), before_round=lambda number: buffer.normal_())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--elements", type=int, default=24_000_000)
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    seconds = run_distributed(measure, options.ranks, options.elements, options.rounds, timeout=600)[0]
    megabytes = options.elements * 4 / 1e6
    table = Table(f"a buffer of {megabytes:.0f} MB on {options.ranks} ranks", "an all-reduce of it", ELAPSED)
    for name, values in all_ratios(seconds, "all_reduce").items():
        milliseconds = statistics.median(seconds[name]) * 1e3
        table.add(name, values, ours=name.startswith("dlo"), control=name.endswith("again"), ms=milliseconds)
    record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
