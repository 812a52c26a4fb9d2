"""How often does `dlo parity` raise a false alarm, and how often does it miss a fault?

    python benchmarks/parity_verdicts.py [--seeds 200] [--first 0] [--faults 60] [--models gpt2 vit]
        [--strategies ddp tp]
    python benchmarks/parity_verdicts.py --quick

Without a fault: each seed with ddp, ZeRO 3, tensor, pipeline and context parallelism on two ranks, pipeline with tensor
parallelism on four, and six small models, six steps each: a GPT-2 of 185,000 parameters, glm4, qwen2_moe, lfm2 and
starcoder2 of transformers, and a ViT of timm. Every NO PARITY is a false
alarm. With a fault, 60 trials: one gradient scaled by 1 +- 1e-3, one rank's share left out of one step, a stale buffer,
a wrong clip, a wrong weight decay, a dropout on the ranks, one skipped sample. Every PARITY is a miss. What a strategy
refuses (a model that it cannot cut) is counted beside.

The verdicts are the tool's own (dlo_framework/testing/parity.py) over trainings on real ranks, which are forked once
and train case after case. Ctrl-C ends the trials, and the record is of those that were run.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

from measuring.catalogue import parse_options
from measuring.parity_cases import MODELS, STRATEGIES, Judge, Trial, clean_trials, faulty_trials
from measuring.record import Record, Table
from measuring.rounds import ELAPSED

from dlo_framework.testing import Comparison

#: A trial's outcome.
REFUSED, PARITY, DIFFERS = "refused", "parity", "no parity"


def outcome(found: Comparison | str) -> str:
    """Returns what a trial came to."""
    return REFUSED if isinstance(found, str) else PARITY if found.ok else DIFFERS


def evidence(found: Comparison | str) -> str:
    """Returns which runs a verdict took, in a word."""
    if isinstance(found, str):
        return found
    if found.double is None:
        return "at once" if found.control is None else "other rounding"
    return "double precision" if found.decided is None or not found.double.within else "another seed"


def told(trial: Trial, found: Comparison | str) -> str:
    """Returns a line on a trial whose verdict is wrong."""
    fault = f", fault {trial.fault}" if trial.fault else ""
    culprits = "" if isinstance(found, str) else f": {', '.join((found.double or found).culprits[:3])}"
    return f"{trial.model}, {trial.strategy}, seed {trial.seed}{fault} ({evidence(found)}){culprits}"


def run(trials: list[Trial], judge: Judge, wrong: str, minutes: float | None) -> dict[str, Any]:
    """Judges trials, as many as there is time for; returns counts and the trials whose outcome is ``wrong``."""
    begin = ELAPSED.now()
    counts: dict[str, Counter[str]] = {}
    by: Counter[str] = Counter()
    lines: list[str] = []
    refusals: dict[str, str] = {}
    done = 0
    try:
        for trial in trials:
            if minutes is not None and ELAPSED.now() - begin > 60 * minutes:
                break
            if done % 300 == 299:
                print(f"{done + 1} of {len(trials)}: seed {trial.seed}", file=sys.stderr, flush=True)
            found = judge.judge(trial)
            kind = trial.fault[0] if trial.fault else trial.strategy
            counts.setdefault(kind, Counter())[outcome(found)] += 1
            done += 1
            if isinstance(found, str):
                refusals.setdefault(f"{trial.model} {trial.strategy}", found)
                continue
            by[evidence(found)] += 1
            if outcome(found) == wrong:
                lines.append(told(trial, found))
                print("WRONG:", lines[-1], file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {done} of {len(trials)} trials", file=sys.stderr)
    seconds = ELAPSED.now() - begin
    return {"counts": counts, "by": by, "wrong": lines, "done": done, "seconds": seconds, "refused": refusals}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="seeds without a fault (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds, to go on (default: 0)")
    parser.add_argument("--faults", type=int, default=60, help="trials with a fault, about (default: 60)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--minutes", type=float, help="time limit of the trials without a fault")
    options = parse_options(parser, __file__)
    seeds = range(options.first, options.first + options.seeds)
    clean = [t for t in clean_trials(seeds) if t.model in options.models and t.strategy in options.strategies]
    faulty = list(faulty_trials(options.faults / 60)) if options.faults else []
    judge = Judge()
    try:
        faults = run(faulty, judge, PARITY, None)
        alarms = run(clean, judge, DIFFERS, options.minutes)
    finally:
        judge.close()
    record = Record.of(__file__, __doc__, options)
    for title, found, wrong, name in (
        ("false alarms without a fault", alarms, DIFFERS, "alarms"),
        ("faults that were missed", faults, PARITY, "missed"),
    ):
        table = Table(title, "trials", "counts")
        total = sum(count[wrong] for count in found["counts"].values())
        table.add("all", [float(total)], bar=0.0, ours=True, trials=found["done"] - len_refused(found))
        for kind, count in found["counts"].items():
            table.add(kind, [float(count[wrong])], trials=count[PARITY] + count[DIFFERS], refused=count[REFUSED])
        table.notes = [*found["wrong"], *(f"refused: {case}: {why}" for case, why in found["refused"].items())]
        table.notes.append(f"{name}: decided by {dict(found['by'])}; {found['seconds']:.0f} s")
        record.add(table)
    record.finish()


def len_refused(found: dict[str, Any]) -> int:
    """Returns how many trials a strategy has refused."""
    return sum(count[REFUSED] for count in found["counts"].values())


if __name__ == "__main__":
    main()
