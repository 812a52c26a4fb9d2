"""What does it take to plan recomputation, and how good are the plans?

    python benchmarks/remat_planning.py [--rounds 3] [--blocks 126] [--slots 500] [--states 1000]

Planning is of Rotor's table and of the program with offloading, for blocks that are all equal, as the planner groups
them, and for blocks that all differ. Both have two modes. Time is this process's, on one core; memory is what numpy and
Python allocate. Plans are of ViT-L's and ResNet-50's blocks by formula, on a V100 with PCIe 3 and 4: Rotor, Rotor with
offloading, and the fastest uniform recomputation that fits, of every nth block or of segments of n blocks. The last
table has what rounding to slots costs. Nothing runs on a device.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import tracemalloc
from collections.abc import Callable

from measuring.activation_chains import CHAINS
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS
from measuring.uniform_recomputation import uniform_schedules

from dlo_framework.errors import DloError
from dlo_plugins.remat.chain import Chain
from dlo_plugins.remat.link import Link
from dlo_plugins.remat.offload import solve_offload
from dlo_plugins.remat.rotor import keep_fastest, solve
from dlo_plugins.remat.schedule import Schedule

LINKS = {"vit": Link(12e9, 12e9), "resnet": Link(25e9, 25e9)}  # PCIe 3, PCIe 4.
SECONDS_BAR, MEGABYTES_BAR = 3.0, 500.0
SHARE = 0.4  # Budget of the timed plans, of what keeping everything needs.


def large_chains(blocks: int) -> dict[str, Chain]:
    """Returns chains of a number of stages, the head among them: equal blocks, and blocks that all differ."""
    equal = CHAINS["vit"]()
    equal = Chain((equal.stages[0],) * (blocks - 1) + equal.stages[-1:], equal.input)
    rng = random.Random(0)
    stages = []
    for stage in equal.stages:
        size, time = rng.uniform(1.0, 1.5), rng.uniform(1.0, 1.5)
        modes = [
            dataclasses.replace(
                mode,
                saved=round(mode.saved * size),
                forward=mode.forward * time,
                backward=mode.backward * time,
                backward_peak=round(mode.backward_peak * size),
            )
            for mode in stage.modes
        ]
        stages.append(dataclasses.replace(stage, output=round(stage.output * size), modes=tuple(modes)))
    return {"equal blocks": equal, "blocks that differ": Chain(tuple(stages), equal.input)}


def peak_megabytes(run: Callable[[], object]) -> float:
    """Returns the peak of what a function allocates, in MB."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def planning_tables(options: argparse.Namespace) -> list[Table]:
    """Returns the time and the memory of planning."""
    seconds = Table(f"seconds to plan {options.blocks} stages in {options.slots} slots", "1 s", PROCESS)
    memory = Table(f"MB to plan {options.blocks} stages in {options.slots} slots", "1 MB", "bytes, counted")
    for name, chain in large_chains(options.blocks).items():
        budget, link = int(SHARE * keep_fastest(chain).peak), LINKS["vit"]

        def rotor(chain: Chain = chain, budget: int = budget) -> Schedule:
            return solve(chain, budget, options.slots)

        def offload(chain: Chain = chain, budget: int = budget, link: Link = link) -> Schedule:
            return solve_offload(chain, budget, link, options.slots, options.states)

        for label, run, rounds in ((f"Rotor, {name}", rotor, options.rounds), (f"with offloading, {name}", offload, 1)):
            bar = SECONDS_BAR if run is rotor else None
            seconds.add(label, [PROCESS.seconds(run) for _ in range(rounds)], bar=bar, ours=True)
            memory.add(label, [peak_megabytes(run)], bar=MEGABYTES_BAR if run is rotor else None, ours=True)
    return [seconds, memory]


def plan_tables(name: str, options: argparse.Namespace) -> list[Table]:
    """Returns the step time of a model's plans by budget, and what rounding to slots costs."""
    chain = CHAINS[name]()
    fastest, link = keep_fastest(chain), LINKS[name]
    unit = "a step that keeps everything"
    table = Table(f"{name}: step time within a budget", unit, "simulated")
    rounding = Table(f"{name}: step time with {options.slots} slots", "16 times as many slots", "simulated")
    uniform = list(uniform_schedules(chain))
    gone = []
    for percent in options.percents:
        budget = int(percent / 100 * fastest.peak)
        try:
            rotor = solve(chain, budget, options.slots)
        except DloError:
            continue
        offload = solve_offload(chain, budget, link, options.slots, options.states)
        fitting = [schedule.time for schedule in uniform if schedule.peak <= budget]
        if fitting:
            table.add(f"{percent}%: best uniform recomputation", [min(fitting) / fastest.time])
        table.add(f"{percent}%: Rotor", [rotor.time / fastest.time], ours=True)
        table.add(f"{percent}%: Rotor with offloading", [offload.time / fastest.time], ours=True)
        rounding.add(f"{percent}%", [rotor.time / solve(chain, budget, 16 * options.slots).time], bar=1.01, ours=True)
        gone.append(f"{(rotor.time - offload.time) / max(rotor.time - fastest.time, 1e-12):.0%} at {percent}%")
    table.notes.append(f"Of the time of recomputation, offloading removes {', '.join(gone)} of the memory.")
    return [table, rounding]


def main() -> None:
    """Plans, and compares the plans."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=126, help="stages of the chains whose planning is timed")
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--states", type=int, default=1000, help="states of the program with offloading")
    parser.add_argument("--percents", type=int, nargs="+", default=[20, 30, 40, 50, 60, 70, 80, 90])
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    for table in planning_tables(options):
        record.add(table)
    for name in CHAINS:
        for table in plan_tables(name, options):
            record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
