"""How much throughput is lost by the layout that `dlo plan` predicts to be the fastest, on a grid of measured layouts?

    python benchmarks/planner_choices.py --rows playbook_1b_8b.csv [--nodes 1 2 4 8]

The rows are those of the Ultra-Scale Playbook (nanotron on H100, sequences of 4,096 tokens), which are not part of
this repository: model, nodes, mbs, grad_acc, dp, pp, tp, zero, tok_s_gpu (empty where the run failed). Of each model
and number of nodes, the layouts that ran, and whose predicted memory fits, are ordered by their predicted time for a
row, from the H100's data sheet and the published bandwidth of the network by number of nodes; of the times nothing is
fitted. Regret is the throughput that the first of them loses against the fastest measured, and the best of the first
three. The time of a step alone is not scored, since some of the grid's runs are slower than others of the same layout
by a factor of ten.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED
from planner_grid import CAPACITY, STATE, GridRun, predict, profile_of, read_runs

from dlo_plugins.planner.machine import Link, load_machine
from dlo_plugins.planner.step_time import TimeModel

MEDIAN_BAR, BEST_OF_THREE_BAR = 0.03, 0.05
#: As `planner_grid.py` finds them: fraction of inputs gathered by `tp` that stay reserved, and gibibytes of libraries.
CONSTANTS = (0.84, 0.30)
#: Published bus bandwidth of an all-reduce of 256 MB by number of nodes, over the eight cards of a node.
NETWORK = {nodes: rate * 1e9 / 8 for nodes, rate in {2: 362, 4: 160, 8: 100, 16: 85, 32: 65, 64: 33}.items()}


def predicted_seconds(runs: Sequence[GridRun]) -> list[float]:
    """Returns the predicted seconds of a row of runs of one model; infinite where a rank needs more than its memory."""
    machine = replace(load_machine("h100"), network=Link(NETWORK, 6e-6))
    # nanotron's tokens come first.
    times = TimeModel(profile_of(runs[0].model), machine, replace(STATE, sequence_first=True))
    found = []
    for run in runs:
        needed = max(rank.total(CONSTANTS) for rank in predict(run))
        fits = needed <= CAPACITY / 2**30
        found.append(times.step(run.layout).total / run.layout.global_batch if fits else math.inf)
    return found


def regrets(seconds: Sequence[float], rates: Sequence[float]) -> tuple[float, float]:
    """Returns the share of the throughput that the first choice loses, and the best of the first three.

    Args:
        seconds: Predicted seconds of a row of each layout.
        rates: Measured throughput of each.
    """
    order = sorted(range(len(rates)), key=lambda number: seconds[number])
    best = max(rates)
    return 1 - rates[order[0]] / best, 1 - max(rates[number] for number in order[:3]) / best


def main() -> None:
    """Predicts, and compares with what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="file of the grid")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    with options.rows.open() as file:
        rows = list(csv.DictReader(file))
    groups: dict[tuple[str, int], list[tuple[GridRun, float]]] = {}
    for row, run in zip(rows, read_runs(options.rows), strict=True):
        if row["tok_s_gpu"] and int(row["nodes"]) in options.nodes:
            groups.setdefault((run.model, int(row["nodes"])), []).append((run, float(row["tok_s_gpu"])))
    table = Table("throughput lost", "the fastest layout", ELAPSED)
    first, three = [], []
    for (model, nodes), runs in sorted(groups.items()):
        one, best = regrets(predicted_seconds([run for run, _ in runs]), [rate for _, rate in runs])
        first.append(one)
        three.append(best)
        table.add(f"{model}, {nodes} nodes, {len(runs)} layouts, first choice", [1 - one], ours=True)
        table.add(f"{model}, {nodes} nodes, {len(runs)} layouts, best of three", [1 - best], ours=True)
    table.notes.append(
        f"lost by the first choice: median {statistics.median(first):.1%} (to reach: {MEDIAN_BAR:.0%}); by the best of"
        f" three: mean {statistics.mean(three):.1%} (to reach: {BEST_OF_THREE_BAR:.0%}); {len(first)} groups"
    )
    record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
