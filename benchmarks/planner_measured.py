"""How near are the predictions of `dlo plan` to what is measured here?

    python benchmarks/planner_measured.py [--only memory time] [--ranks 1 2 4] [--rounds 5]

Each run has the strategy that the plan would write, and Lightning's training loop. Models have random weights.

- Memory: the peak of a step on the rank that needs most, of all tensors and of what else the heap has beside them,
  against the predicted one without the process's own memory. It is not timed, so other programs do not change it.
- Time: the machine is measured by `dlo plan --measure` for each number of ranks, and the step time of each layout is
  predicted from it. Layouts take turns; the median over the rounds counts. The first layout of each model
  runs twice, as the control.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

from measuring.catalogue import parse_options
from measuring.planned_runs import ADAPTED, case, measure_peaks, measure_steps, predicted
from measuring.record import Record, Table
from measuring.rounds import ELAPSED

from dlo_framework.testing import run_distributed
from dlo_plugins.plan.machine import load_machine, parse_machine
from dlo_plugins.plan.measurement import measure_machine

MEMORY_BAR, ORDER_BAR = 0.1, 0.9  # Mean error of memory, rank correlation of times.
MEMORY = [
    case("llama", 16), case("llama", 16, recompute="full"), case("llama", 16, recompute="selective"),
    case("llama", 4, 4), case("gpt", 8), case("gpt", 8, recompute="full"), case("vit", 16),
    case("vit", 16, recompute="full"), case("coatnet", 8), case("coatnet", 4, 2),
    case("llama", 8, dp_shard=2), case("llama", 8, dp_shard=2, zero=2), case("llama", 4, 2, dp_shard=2),
    case("llama", 4, 2, dp_shard=2, reduce_each=True), case("llama", 8, dp_replicate=2), case("llama", 8, tp=2),
    case("llama", 8, cp=2), case("llama", 4, 4, pp=2), case("llama", 4, 4, pp=2, recompute="full"),
    case("llama", 2, 8, pp=2, schedule="Interleaved1F1B", stages_per_rank=2), case("gpt", 8, tp=2),
    case("vit", 8, dp_shard=2, recompute="full"), case("coatnet", 4, dp_shard=2),
    case("llama", 4, dp_shard=4), case("llama", 4, 2, dp_shard=2, tp=2), case("llama", 4, 4, pp=2, tp=2),
    case("vit", 4, dp_replicate=2, dp_shard=2), case("vit", 4, 4, pp=2, dp_shard=2), case("gpt", 2, 4, pp=4),
    *(case(kind, 8) for kind in ADAPTED), *(case(kind, 4, dp_shard=2) for kind in ADAPTED),
    case("llama bf16", 16), case("llama bf16", 16, recompute="full"), case("llama bf16", 4, 4), case("gpt bf16", 8),
    case("vit bf16", 16), case("vit bf16", 16, recompute="full"), case("llama bf16", 8, dp_shard=2),
    case("llama bf16", 8, dp_replicate=2), case("llama bf16", 8, tp=2), case("llama bf16", 4, 4, pp=2),
    case("vit bf16", 8, dp_shard=2),
    case("mixture", 8), case("mixture", 8, recompute="full"), case("mixture", 8, dp_shard=2),
    case("mixture", 8, dp_shard=2, ep=2), case("mixture", 8, dp_shard=2, ep=2, recompute="full"),
    case("mixture", 8, dp_shard=2, ep=2, zero=2), case("mixture", 4, 2, dp_shard=2, ep=2),
    case("mixtral", 8, dp_shard=2, ep=2), case("mixtral", 8, dp_shard=2, ep=2, recompute="selective"),
    case("mixtral", 8, dp_shard=2, recompute="selective"),
    case("mixture bf16", 8, dp_shard=2, ep=2), case("mixture", 4, dp_shard=4, ep=2),
]  # fmt: skip
#: Layouts that train with 16 rows a step.
TIME = [
    case("llama", 8, dp_shard=2), case("llama", 4, 2, dp_shard=2), case("llama", 8, dp_shard=2, zero=2),
    case("llama", 8, dp_shard=2, recompute="full"), case("llama", 8, dp_replicate=2), case("llama", 16, tp=2),
    case("llama", 4, 4, tp=2), case("llama", 4, 4, pp=2), case("llama", 2, 8, pp=2), case("llama", 8, 1, cp=2),
    case("llama", 4, dp_shard=4), case("llama", 2, 2, dp_shard=4), case("llama", 8, dp_shard=2, tp=2),
    case("llama", 4, 4, pp=2, tp=2), case("llama", 4, 2, pp=2, dp_shard=2), case("llama", 2, 8, pp=4),
    case("mixture", 8, dp_shard=2), case("mixture", 8, dp_shard=2, ep=2), case("mixture", 4, 2, dp_shard=2, ep=2),
    case("mixture", 8, dp_shard=2, ep=2, recompute="full"), case("mixtral", 8, dp_shard=2),
    case("mixtral", 8, dp_shard=2, ep=2),
]  # fmt: skip


def memory_tables(options: argparse.Namespace) -> list[Table]:
    """Returns predicted over measured peaks."""
    table = Table("memory: predicted peak", "the measured peak", "bytes of tensors and of the heap beside them")
    machine, errors = load_machine("cpu"), []
    for ranks in options.ranks:
        kinds = options.kinds or {one.kind for one in MEMORY}
        cases = [one for one in MEMORY if one.ranks == ranks and one.kind in kinds][: options.cases]
        candidates = [(one.kind, predicted(one, machine)) for one in cases]
        found = run_distributed(measure_peaks, ranks, candidates, backend=None, timeout=1200) if cases else []
        for number, (one, (_, candidate)) in enumerate(zip(cases, candidates, strict=True)):
            measured = max(of_rank[number] for of_rank in found)
            guess = candidate.memory.total - candidate.memory.overhead
            errors.append(guess / measured - 1)
            table.add(f"{one}, {ranks} ranks", [guess / measured], ours=True, MB=measured / 1e6)
    table.notes.append(
        f"mean error {statistics.mean(map(abs, errors)):.1%} (to reach: {MEMORY_BAR:.0%}), largest"
        f" {max(map(abs, errors)):.1%}, of {len(errors)}"
    )
    return [table]


def time_tables(options: argparse.Namespace) -> list[Table]:
    """Returns predicted over measured step times."""
    table = Table("time: predicted step", "the measured step", ELAPSED)
    errors, order = [], []
    kinds = dict.fromkeys(one.kind for one in TIME if not options.kinds or one.kind in options.kinds)
    for ranks, kind in itertools.product([number for number in options.ranks if number > 1], kinds):
        cases = [one for one in TIME if one.ranks == ranks and one.kind == kind][: options.cases]
        if not cases:
            continue
        machine = parse_machine(measure_machine("float32", ranks, "cpu"), "measured")
        candidates = [(one.kind, predicted(one, machine)) for one in cases]
        runs = [*candidates, candidates[0]]
        found = run_distributed(measure_steps, ranks, runs, options.rounds, backend=None, timeout=2400)[0]
        again = statistics.median(found[-1]) / statistics.median(found[0])
        table.notes.append(f"{kind}, {ranks} ranks: the first layout again takes {again:.3f} of its time.")
        for one, (_, candidate), seconds in zip(cases, candidates, found, strict=False):
            measured, guess = statistics.median(seconds), candidate.time.total
            errors.append(guess / measured - 1)
            order.append((f"{kind}, {ranks} ranks", guess, measured))
            table.add(
                f"{one}, {ranks} ranks", [guess / value for value in seconds], ours=True, ms=measured * 1e3,
                predicted_ms=guess * 1e3,
            )  # fmt: skip
    table.notes.append(f"median error of times {statistics.median(map(abs, errors)):.1%}, of {len(errors)}")
    for name in dict.fromkeys(name for name, *_ in order):
        table.notes.append(choices(name, [(guess, measured) for other, guess, measured in order if other == name]))
    return [table]


def choices(name: str, pairs: list[tuple[float, float]]) -> str:
    """Returns the sentence on the order of predicted and measured times, and on the first choice."""
    chosen = min(pairs)[1] / min(measured for _, measured in pairs) - 1
    correlation = rank_correlation([guess for guess, _ in pairs], [measured for _, measured in pairs])
    return (
        f"{name}: rank correlation {correlation:.2f} (to reach: {ORDER_BAR}); the first choice is {chosen:.1%} slower"
        " than the best."
    )


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Returns Spearman's rank correlation."""
    if len(one) < 3:
        return 1.0
    places = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*[[float(place) for place in found] for found in places])


def main() -> None:
    """Measures, and compares with what is predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("memory", "time"), default=["memory", "time"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", help="of models, such as 'llama bf16'; all by default")
    parser.add_argument(
        "--cases", type=int, default=100, help="largest number of layouts of a model for a number of ranks"
    )
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    for name, tables in (("memory", memory_tables), ("time", time_tables)):
        for table in tables(options) if name in options.only else []:
            record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
