"""Are runs that are killed, stopped or out of disk lost, do they hang, and how soon do they go on?

    python benchmarks/chaos.py [--trials 50] [--first 0] [--runs "quick start" "tp 2"] [--folder runs/chaos]

A shortened quick start on one process (compiled), and on two under zero3 and tensor parallelism, meets a fault at a
random time: KILL, TERM, INT and INT twice, a stopped process, a full disk; while it starts, compiles, trains,
validates, saves and in its last second. It is started with the same words, `--ckpt_path auto`, until it has finished.
Its figures have to be those of the run that was left alone, to the last bit. What went wrong stays in the folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from chaos_runs.trials import FAULTS, RUNS, Trial, carry_out, draw, left_alone
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED


def main() -> int:
    """Runs the trials; returns 1 if one was lost or hung."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, to go on where one stopped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--warm", action="store_true", help="fork processes from one that has imported torch: sooner")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "chaos")
    options = parse_options(parser, __file__)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    expected = {}
    for run in options.runs:
        alone = folder / f"alone {run}"
        shutil.rmtree(alone, ignore_errors=True)
        expected[run] = left_alone(alone, run, options.epochs, options.warm)
        print(f"{run}, left alone: {expected[run]}", flush=True)
    trials: list[Trial] = []
    for number in range(options.first, options.first + options.trials):
        place = folder / f"trial {number}"
        shutil.rmtree(place, ignore_errors=True)
        trial = draw(number, options.seed, options.runs)
        trials.append(carry_out(trial, place, options.epochs, expected[trial.run], options.warm))
        print(number, trial, flush=True)
    record = Record.of(__file__, __doc__, options)
    table = Table("from a fault to the next step", "seconds", ELAPSED)
    for fault in FAULTS:
        chosen = [trial for trial in trials if trial.fault == fault]
        seconds = [trial.recovery for trial in chosen if trial.recovery is not None]
        if seconds:
            bad = {"lost": sum(bool(t.lost) for t in chosen), "hung": sum(t.hung for t in chosen)}
            table.add(fault, seconds, ours=True, trials=len(chosen), **bad)
    record.add(table)
    counts = Table("runs that were lost or hung", "runs", ELAPSED)
    counts.add("lost", [float(sum(bool(trial.lost) for trial in trials))], bar=0.0, ours=True, trials=len(trials))
    counts.add("hung", [float(sum(trial.hung for trial in trials))], bar=0.0, ours=True, trials=len(trials))
    record.add(counts)
    record.finish()
    return int(any(trial.lost or trial.hung for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
