"""Are runs that are killed, stopped or out of disk lost, do they hang, and how soon do they go on?

    python benchmarks/chaos.py [--trials 50] [--first 0] [--runs "quick start" "tp 2"] [--faults KILL]
    [--folder runs/chaos]

A shortened quick start on one process (compiled), and on two under zero3, FSDP, DeepSpeed and tensor parallelism, and a
mixture of texts with a loading process, on one process and on two under zero3, meet a fault at a random time: KILL,
TERM, INT and INT twice, a stopped process, a full disk; while they start, compile, train, validate, save and in their
last second. The elastic run has three nodes of torchrun, of which one is lost and comes back; its figures may differ by
rounding. A run is started with the same words, `--ckpt_path auto`, until it has finished. Its figures have to be
those of the run that was left alone, to the last bit. What went wrong stays in the folder. A fault without effect, such
as one after the end of the run, is counted apart, and another trial takes its place.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
from pathlib import Path

from chaos_runs.trials import FAULTS, NODE, RUNS, Trial, carry_out, draw, import_all, left_alone
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
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="of runs that are not elastic"
    )
    parser.add_argument("--warm", action="store_true", help="fork processes from one that has imported all: sooner")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "chaos")
    options = parse_options(parser, __file__)
    # A shell has its background jobs ignore Ctrl-C, and the runs would too. What is handled here is not ignored there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.warm:
        import_all()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    expected = {}
    for run in options.runs:
        alone = folder / f"alone {run}"
        shutil.rmtree(alone, ignore_errors=True)
        expected[run] = left_alone(alone, run, options.epochs, options.warm)
        print(f"{run}, left alone: {expected[run]}", flush=True)
    trials: list[Trial] = []
    for number in range(options.first, options.first + 2 * options.trials):
        if sum(counts(trial) for trial in trials) == options.trials:
            break
        place = folder / f"trial {number}"
        shutil.rmtree(place, ignore_errors=True)
        trial = draw(number, options.seed, options.runs, options.faults)
        trials.append(carry_out(trial, place, options.epochs, expected[trial.run], options.warm))
        print(number, trial, flush=True)
    record = Record.of(__file__, __doc__, options)
    by_run = Table("trials of each run and fault", "trials", ELAPSED)
    for run in options.runs:
        for fault in [*FAULTS, NODE]:
            chosen = [trial for trial in trials if (trial.run, trial.fault) == (run, fault)]
            if chosen:
                by_run.add(f"{run}, {fault}", [float(sum(map(counts, chosen)))], ours=True, **columns(chosen))
    record.add(by_run)
    by_fault = Table("from a fault to the next step", "seconds", ELAPSED)
    for fault in [*FAULTS, NODE]:
        chosen = [trial for trial in trials if trial.fault == fault and counts(trial)]
        seconds = [trial.recovery for trial in chosen if trial.recovery is not None]
        if seconds:
            by_fault.add(fault, seconds, ours=True, trials=len(chosen))
    record.add(by_fault)
    wrong = Table("runs that were lost or hung", "runs", ELAPSED)
    counted = sum(map(counts, trials))
    wrong.add("lost", [float(sum(bool(trial.lost) for trial in trials))], bar=0.0, ours=True, trials=counted)
    wrong.add("hung", [float(sum(trial.hung for trial in trials))], bar=0.0, ours=True, trials=counted)
    record.add(wrong)
    record.finish()
    return int(any(trial.lost or trial.hung for trial in trials))


def counts(trial: Trial) -> bool:
    """Returns whether the fault changed anything; a run that was lost or hung counts in any case."""
    return bool(trial.lost) or trial.hung or not trial.no_effect


def columns(trials: list[Trial]) -> dict[str, float | None]:
    """Returns what a row of the first table has beside the number of trials."""
    seconds = [trial.recovery for trial in trials if trial.recovery is not None and counts(trial)]
    return {
        "lost": sum(bool(trial.lost) for trial in trials),
        "hung": sum(trial.hung for trial in trials),
        "without_effect": sum(not counts(trial) for trial in trials),
        "seconds_to_next_step": statistics.median(seconds) if seconds else None,
    }


if __name__ == "__main__":
    sys.exit(main())
