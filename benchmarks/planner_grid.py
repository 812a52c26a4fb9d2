"""How near is the memory that `dlo plan` predicts to that of another framework's runs on a grid of layouts?

    python benchmarks/planner_grid.py --rows playbook_1b_8b.csv

The rows are those of the Ultra-Scale Playbook (nanotron on H100, sequences of 4,096 tokens): model, mbs, grad_acc, dp,
pp, tp, zero, gpu_gb (empty where the run failed). They are not part of this repository. Its framework differs from dlo,
and so do the layouts here:

- Parameters and their gradients are bfloat16; gradients accumulate in single precision, in full under ZeRO 1; master
  weights and both moments are single precision. DistributedDataParallel, which runs without ZeRO, has buckets.
- Stages have equal costs of products, those of the last projection included: the last may have no block.
- The largest reserved memory of the first rank is reported, not that of the rank that needs most.

Four factors are fitted on 40 runs, on state, activations, the loss and a constant, and judged on the others; this is
repeated for several choices of the 40. Runs whose failure has another cause than memory are counted apart: fewer
micro-batches than ranks of the pipeline less one, which its 1F1B asserts, and a loss that is not on the last rank,
which gets the labels. So are failures beside a run that succeeded and needs at least as much memory: of the same model,
axes `pp` and `tp`, rows and ZeRO stage, with no fewer micro-batches on no more ranks.
"""

from __future__ import annotations

import argparse
import csv
import functools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED

from dlo_framework.mesh import MeshSpec
from dlo_plugins.planner.layout import Layout, StateFormat
from dlo_plugins.planner.machine import load_machine
from dlo_plugins.planner.model_profile import ModelProfile, profile_model
from dlo_plugins.planner.rank_memory import MemoryModel, RankMemory
from dlo_plugins.planner.step_time import TimeModel
from dlo_tasks.llm.causal_lm import CausalLM

LENGTH, VOCABULARY, CALIBRATED = 4096, 131_072, 40
#: Layers, width, hidden width, heads, and whether the embeddings are tied.
MODELS = {"1B": (16, 2048, 8192, 32, True), "8B": (32, 4096, 14336, 32, False)}
#: Parameters, gradients in products, gradients that accumulate; master weights and moments.
STATE = StateFormat("bfloat16", 2, 2, 4, 4, 12.0, fused=True, compiled=True)


@dataclass(frozen=True)
class GridRun:
    """Run of the grid.

    Attributes:
        layout: Layout as dlo names it.
        model: Name of the model.
        measured: Gibibytes that the first rank reserved; None where the run failed.
        cause: Cause of a failure that is not memory; empty for none that is known.
    """

    layout: Layout
    model: str
    measured: float | None
    cause: str


class _Windows:
    seq_len = LENGTH


@functools.cache
def profile_of(model: str) -> ModelProfile:
    """Returns the profile of a model of the grid."""
    layers, width, hidden, heads, tied = MODELS[model]
    task = CausalLM(
        config={
            "model_type": "llama", "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": VOCABULARY,
            "max_position_embeddings": LENGTH, "tie_word_embeddings": tied,
        }
    ).on_meta()  # fmt: skip
    found = profile_model(task, task.example_batch(_Windows()), task.parallel_plan(), dtype=torch.bfloat16)  # type: ignore[arg-type]
    return replace(found, max_logits=None)


def grid_split(model: str, stages: int) -> tuple[tuple[int, ...], bool]:
    """Returns the blocks of each stage by equal costs of products, and whether the last stage has the loss.

    A stage ends with the first part that brings the cost of all stages so far above its share. The loss is the last
    part, after the norm, the projection and a cast; labels go to the stage that would come next, or to the last.
    """
    layers, width, hidden, _, _ = MODELS[model]
    block, head = 4 * width * width + 3 * hidden * width, VOCABULARY * width
    total, counts, at, reached, place = layers * block + head, [0] * stages, 0, 0, 0
    for cost in (*[block] * layers, 0, head, 0, 0):
        counts[at] += cost == block
        reached, place = reached + cost, at
        at += reached > total * (at + 1) / stages and at < stages - 1
    return tuple(counts), place == at == stages - 1


def read_runs(path: Path) -> list[GridRun]:
    """Returns the runs of a file."""
    with path.open() as file:
        return [_read_run(row) for row in csv.DictReader(file)]


def with_causes(runs: Sequence[GridRun]) -> list[GridRun]:
    """Returns the runs, of which failures beside a run that succeeded with at least their memory have a cause."""

    def kind(run: GridRun) -> tuple[object, ...]:
        mesh = run.layout.mesh
        return run.model, mesh.pp, mesh.tp, run.layout.micro_batch, run.layout.zero, mesh.data_size > 1

    succeeded: dict[tuple[object, ...], list[GridRun]] = {}
    for run in runs:
        if run.measured is not None:
            succeeded.setdefault(kind(run), []).append(run)
    found = []
    for run in runs:
        others = succeeded.get(kind(run), []) if run.measured is None and not run.cause else []
        needs_more = any(
            other.layout.micro_batches >= run.layout.micro_batches
            and other.layout.mesh.data_size <= run.layout.mesh.data_size
            for other in others
        )
        found.append(replace(run, cause="another run with at least its memory succeeded") if needs_more else run)
    return found


def _read_run(row: Mapping[str, str]) -> GridRun:
    pp, dp, count, zero = (int(row[key]) for key in ("pp", "dp", "grad_acc", "zero"))
    shards = dp if zero else 1
    mesh = MeshSpec(pp=pp, dp_replicate=dp // shards, dp_shard=shards, tp=int(row["tp"]))
    split, ends_last = grid_split(row["model"], pp)
    zero = zero if dp > 1 else 0
    layout = Layout(mesh, int(row["mbs"]), count, split=split if pp > 1 else None, zero=zero)
    cause = "" if ends_last else "the loss is not on the last rank"
    if pp - 1 > count:
        cause = "fewer micro-batches than its 1F1B needs"
    return GridRun(layout, row["model"], float(row["gpu_gb"]) if row["gpu_gb"] else None, cause)


@functools.cache
def memory_model(model: str, buckets: bool) -> MemoryModel:
    """Returns the memory model of a model, with or without buckets of gradients."""
    state = replace(STATE, gradient=STATE.gradient + 2 * buckets)
    return MemoryModel(TimeModel(profile_of(model), load_machine("h100"), state))


def predict(run: GridRun) -> list[RankMemory]:
    """Returns the memory of each rank of the pipeline."""
    buckets = not run.layout.zero and run.layout.mesh.dp_replicate > 1
    return memory_model(run.model, buckets).ranks(run.layout)


def features(memory: RankMemory) -> list[float]:
    """Returns the gibibytes of the parts that are calibrated, and 1 for the constant."""
    gibibyte = 2.0**30
    activations = memory.activations + memory.working
    return [memory.state / gibibyte, activations / gibibyte, memory.loss / gibibyte, 1.0]


def fit(rows: Sequence[Sequence[float]], measured: Sequence[float]) -> list[float]:
    """Returns factors without negative ones that have the least sum of relative errors, by reweighted least squares."""
    from scipy.optimize import nnls

    matrix, target = torch.tensor(rows, dtype=torch.float64), torch.tensor(measured, dtype=torch.float64)
    weights = 1 / target
    for _ in range(30):
        factors = torch.from_numpy(nnls((matrix * weights[:, None]).numpy(), (target * weights).numpy())[0])
        errors = (matrix @ factors / target - 1).abs().clamp_min(0.02)
        weights = 1 / target / errors.sqrt()
    return factors.tolist()


def auc(failed: Sequence[float], ran: Sequence[float]) -> float:
    """Returns the probability that a failed run's prediction is above that of one that ran."""
    return statistics.mean((a > b) + 0.5 * (a == b) for a in failed for b in ran)


def errors_of(runs: Sequence[GridRun], choice: int) -> tuple[float, list[float]]:
    """Returns the mean error of the runs that were not calibrated on, and the factors.

    Args:
        runs: Runs that did not fail.
        choice: Number of the choice of the calibrated runs.
    """
    order = random.Random(choice).sample(range(len(runs)), len(runs))
    rows = [features(predict(run)[0]) for run in runs]
    measured = [run.measured or 0.0 for run in runs]
    own, others = order[:CALIBRATED], order[CALIBRATED:]
    factors = fit([rows[n] for n in own], [measured[n] for n in own])
    guesses = [sum(f * x for f, x in zip(factors, rows[n], strict=True)) for n in others]
    return statistics.mean(abs(g / measured[n] - 1) for g, n in zip(guesses, others, strict=True)), factors


def main() -> None:
    """Predicts each run, and prints the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="file of the grid")
    parser.add_argument("--choices", type=int, default=12, help="choices of the calibrated runs")
    options = parse_options(parser, __file__)
    runs = with_causes(read_runs(options.rows))
    ran = [run for run in runs if run.measured is not None]
    record = Record.of(__file__, __doc__, options)
    table = Table("memory: predicted over reserved", "the reserved memory of the first rank", ELAPSED)
    for model in MODELS:
        ratios = [predict(run)[0].total / 2**30 / (run.measured or 1.0) for run in ran if run.model == model]
        table.add(f"{model}, without calibration", ratios, ours=True)
    found = [errors_of(ran, choice) for choice in range(options.choices)]
    errors = [error for error, _ in found]
    factors = [statistics.median(one[at] for _, one in found) for at in range(4)]
    table.notes.append(
        f"calibrated on {CALIBRATED} of {len(ran)} runs: mean error {statistics.mean(errors):.1%} ({min(errors):.1%} to"
        f" {max(errors):.1%} for {options.choices} choices); factors of state, activations, loss, constant (GiB):"
        f" {', '.join(f'{factor:.2f}' for factor in factors)}"
    )
    failed = [run for run in runs if run.measured is None]
    most = {id(run): max(memory.total for memory in predict(run)) for run in runs}
    for name, chosen in (("all", failed), ("without a known cause", [run for run in failed if not run.cause])):
        value = auc([most[id(run)] for run in chosen], [most[id(run)] for run in ran])
        table.notes.append(f"AUC of the largest rank's memory, {len(chosen)} failed runs, {name}: {value:.3f}")
    causes = {run.cause: 0 for run in runs if run.cause}
    for cause in causes:
        counts = [sum(run.cause == cause for run in group) for group in (failed, ran)]
        table.notes.append(f"{cause}: {counts[0]} runs failed, {counts[1]} ran")
    record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
