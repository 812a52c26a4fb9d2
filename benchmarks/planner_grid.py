"""How near is the memory that `dlo plan` predicts to that of another framework's runs on a grid of layouts?

    python benchmarks/planner_grid.py --rows playbook_1b_8b.csv [--table bench_final2_mod_add.csv]

The rows are those of the Ultra-Scale Playbook (nanotron on H100, sequences of 4,096 tokens): model, mbs, grad_acc, dp,
pp, tp, zero, gpu_gb (empty where the run failed). They are not part of this repository. Its framework differs from dlo,
and so do the layouts here:

- Parameters and their gradients are bfloat16; gradients accumulate in single precision, in full under ZeRO 1; master
  weights and both moments are single precision. DistributedDataParallel, which runs without ZeRO, has buckets.
- Under ZeRO 1 the parameters are gathered into a flat buffer of their full size, from which they are copied.
- The gated activation runs by single operators, so that backward also keeps SiLU's output.
- The loss is computed in place: bfloat16 logits, their copy in single precision, and one difference.
- `tp` gathers the inputs of its regions on NCCL's stream. The allocator reuses such a block after its gather has run,
  and the host runs ahead of the device: then the gathered inputs of all blocks are reserved at once, if there is memory
  for them. With a pipeline the host waits for the device whenever it receives.
- Stages have equal costs of products, those of the last projection included: the last may have no block.
- The largest reserved memory of the first rank is reported, not that of the rank that needs most.

How far the host runs ahead is not known, nor what the libraries take: the fraction of the gathered inputs that stay
reserved without a pipeline, and a constant, are fitted on 40 runs, and judged on the others. This is repeated for
several choices of the 40. Nothing else is fitted.

The errors of two guesses that know more are printed for comparison: the best constant of each group of runs, chosen
with all its runs in sight, and the median of a run's other runs in its group. One kind of groups are runs that agree
in model, `pp`, `tp`, rows and micro-batches in flight, and so keep the same activations; the guess is beyond their
state. The other are runs without ZeRO whose first rank does the same work on the same bytes: there the first guess is
a lower bound of the error of any model of memory.

A second prediction replays the first rank's allocations on torch's allocator (`measuring/nanotron_step.py`), since what
a process reserves is more than its tensors. Three constants are fitted on the 40 runs: the number of tensors that
collectives on NCCL's stream still need when the host frees them, at most and always, and what libraries take.

The published table says of each run whether nanotron's pipeline was fixed before it (column `after_pp_fix`). `--table`
reads that column, and from `status` which runs failed for memory. Without it, runs with a pipeline count as later ones,
and the others as earlier ones. What differs, seen with all rows in sight:

- Before, a stage ends with the first block above its share; after, with the first that reaches it.
- Before, the host runs ahead of the device on one stage: blocks of all micro-batches so far can wait for their two
  collectives. With a pipeline nothing waits.
- After, nothing waits on one stage. In a pipeline it runs ahead while its first forwards fill the stages after it, up
  to the last two of them; and throughout where a block takes the device longer than the host (about 2 ms of products),
  there are more micro-batches than stages, and `tp` stays in a node.

Runs whose failure has another cause than memory are counted apart: fewer micro-batches than ranks of the pipeline less
one, which its 1F1B asserts, and a loss that is not on the last rank, which gets the labels. So are failures that a run
which succeeded proves to fit, whatever the model of memory: a run of the same model, `pp` and ZeRO stage, with no more
ranks of `tp`, nor under ZeRO 1 of data parallelism, and with no fewer rows in a micro-batch and in flight.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from measuring.catalogue import parse_options
from measuring.nanotron_step import Shape, StepLayout, reserved_bytes
from measuring.record import Record, Table
from measuring.rounds import ELAPSED

from dlo_framework.mesh import MeshSpec
from dlo_plugins.planner.in_flight import count_in_flight
from dlo_plugins.planner.layout import Layout, StateFormat
from dlo_plugins.planner.machine import load_machine
from dlo_plugins.planner.model_profile import ModelProfile, profile_model
from dlo_plugins.planner.rank_memory import MemoryModel
from dlo_plugins.planner.step_time import TimeModel
from dlo_tasks.llm.causal_lm import CausalLM

LENGTH, VOCABULARY, CALIBRATED = 4096, 131_072, 40
#: Layers, width, hidden width, heads, and whether the embeddings are tied.
MODELS = {"1B": (16, 2048, 8192, 32, True), "8B": (32, 4096, 14336, 32, False)}
#: Parameters, gradients in products, gradients that accumulate; master weights and moments.
STATE = StateFormat("bfloat16", 2, 2, 4, 4, 12.0, fused=True, compiled=True)
#: Bytes of the device that a process can reserve.
CAPACITY = 79.6 * 2.0**30
#: Floating-point operations of a block's products, above which the device needs longer for it than the host: 2 ms.
SLOW = 1.2e12
#: Largest number of ranks of `tp` in a node.
NODE = 8
#: Bytes of the loss for each logit: in half precision, in single precision, and their difference to the largest.
_LOSS = 10


@dataclass(frozen=True)
class GridRun:
    """Run of the grid.

    Attributes:
        layout: Layout as dlo names it.
        model: Name of the model.
        measured: Gibibytes that the first rank reserved; None where the run failed.
        cause: Cause of a failure that is not memory; empty for none that is known.
        is_after_fix: Whether it ran after the fix of nanotron's pipeline.
        status: Status of a failed run in the published table; empty without the table.
    """

    layout: Layout
    model: str
    measured: float | None
    cause: str
    is_after_fix: bool = False
    status: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies a run in the published table."""
        layout, mesh = self.layout, self.layout.mesh
        return self.model, mesh.data_size, mesh.pp, mesh.tp, layout.micro_batch, layout.micro_batches


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


def first_blocks(run: GridRun) -> int:
    """Returns the blocks of the first stage."""
    layers, width, hidden, _, _ = MODELS[run.model]
    block, head, pp = 4 * width * width + 3 * hidden * width, VOCABULARY * width, run.layout.mesh.pp
    share = (layers * block + head) / pp
    if pp == 1:
        return layers
    return math.ceil(share / block) if run.is_after_fix else math.floor(share / block) + 1


def read_runs(path: Path, table: Path | None = None) -> list[GridRun]:
    """Returns the runs of a file.

    Args:
        path: Rows.
        table: Published table, which says when each run ran and why it failed; None for a guess of the former.
    """
    with path.open() as file:
        runs = [_read_run(row) for row in csv.DictReader(file)]
    if table is None:
        return [replace(run, is_after_fix=run.layout.mesh.pp > 1) for run in runs]
    sizes = {(layers, width): name for name, (layers, width, _, _, _) in MODELS.items()}
    found: dict[tuple[object, ...], list[tuple[float, bool, str]]] = {}
    with table.open() as file:
        for row in csv.DictReader(file):
            model = sizes.get((int(row["num_layers"]), int(row["hidden_size"])))
            if model and int(row["seq_len"]) == LENGTH and row["batch_accum"]:
                numbers = (int(float(row[name])) for name in ("dp", "pp", "tp", "mbs", "batch_accum"))
                entry = float(row["Mem Res (GB)"] or 0.0), row["after_pp_fix"] == "True", row["status"]
                found.setdefault((model, *numbers, int(row["zero_stage"])), []).append(entry)
    return [_with_entry(run, found) for run in runs]


def _with_entry(run: GridRun, found: Mapping[tuple[object, ...], list[tuple[float, bool, str]]]) -> GridRun:
    """Returns a run with its entry of the published table: the nearest in memory where a layout ran twice."""
    stages = (run.layout.zero, 1) if run.layout.mesh.data_size == 1 else (run.layout.zero,)
    entries = [entry for zero in stages for entry in found.get((*run.key, zero), [])]
    if not entries:
        raise ValueError(f"--table must have each run of --rows, got none of {run.model} with {run.layout}")
    _, is_after_fix, status = min(entries, key=lambda entry: abs(entry[0] - (run.measured or 0.0)))
    return replace(run, is_after_fix=is_after_fix, status=status if run.measured is None else "")


def with_causes(runs: Sequence[GridRun]) -> list[GridRun]:
    """Returns the runs, of which failures beside a run that succeeded with at least their memory have a cause."""

    def kind(run: GridRun) -> tuple[object, ...]:
        mesh = run.layout.mesh
        return run.model, mesh.pp, run.layout.zero, mesh.data_size > 1

    def needs_more(other: GridRun, run: GridRun) -> bool:
        one, two = other.layout, run.layout
        shares = (one.mesh.tp, one.mesh.dp_shard), (two.mesh.tp, two.mesh.dp_shard)
        rows = (one.micro_batch, _rows_in_flight(one)), (two.micro_batch, _rows_in_flight(two))
        return all(a <= b for a, b in zip(*shares, strict=True)) and all(a >= b for a, b in zip(*rows, strict=True))

    succeeded: dict[tuple[object, ...], list[GridRun]] = {}
    for run in runs:
        if run.measured is not None:
            succeeded.setdefault(kind(run), []).append(run)
    found = []
    for run in runs:
        others = succeeded.get(kind(run), []) if run.measured is None and not run.cause else []
        is_known = any(needs_more(other, run) for other in others)
        found.append(replace(run, cause="another run with at least its memory succeeded") if is_known else run)
    return found


def _rows_in_flight(layout: Layout) -> int:
    """Returns the rows whose activations the first rank of the pipeline keeps at once."""
    return layout.micro_batch * min(layout.micro_batches, layout.mesh.pp)


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


@dataclass(frozen=True)
class GridMemory:
    """Gibibytes of a rank of a run.

    Attributes:
        state: Parameters, gradients and optimizer, with the buffer in which ZeRO 1 gathers.
        activations: Activations in flight, those of the block that runs, and the loss.
        pending: Gathered inputs of all regions of `tp` that may stay reserved.
    """

    state: float
    activations: float
    pending: float

    def total(self, factors: Sequence[float]) -> float:
        """Returns the reserved memory.

        Args:
            factors: Fraction of the pending inputs that stay reserved, and the gibibytes of the libraries.
        """
        return self.state + self.activations + factors[0] * self.pending + factors[1]


@functools.cache
def predict(run: GridRun) -> tuple[GridMemory, ...]:
    """Returns the memory of each rank of the pipeline."""
    layout, mesh = run.layout, run.layout.mesh
    buckets = not layout.zero and mesh.dp_replicate > 1
    layers, width, hidden, _, _ = MODELS[run.model]
    split, tokens = layout.split or (layers,), layout.micro_batch * LENGTH
    silu, logits = STATE.gathered * tokens * hidden / mesh.tp, _LOSS * tokens * VOCABULARY / mesh.tp
    inputs = 2 * STATE.gathered * tokens * width  # Those of attention and of the MLP.
    found = []
    for memory, flying in zip(memory_model(run.model, buckets).ranks(layout), count_in_flight(layout), strict=True):
        blocks = sum(count * split[stage] for stage, count in zip(flying.stages, flying.together, strict=True))
        activations = memory.activations + memory.working + blocks * silu
        state, pending = memory.state, 0.0
        if layout.stages - 1 in flying.stages:
            activations += max(0.0, logits - memory.working)
        if layout.zero and mesh.dp_shard > 1:
            state += memory.parameters
        if mesh.pp == 1 and mesh.tp > 1:
            pending = min(layers * inputs, max(0.0, CAPACITY - state - activations))
        found.append(GridMemory(*(size / 2.0**30 for size in (state, activations, pending))))
    return tuple(found)


@dataclass(frozen=True)
class ReplayedMemory:
    """Reserved gibibytes of the first rank.

    Attributes:
        replayed: Bytes that the replay of its allocations reserves.
        full: Bytes of a tensor of all tokens of a micro-batch; 0 without `tp`.
        waiting: Most tensors that can wait for collectives, if the host is that far ahead.
    """

    replayed: float
    full: float
    waiting: float

    def total(self, constants: Sequence[float]) -> float:
        """Returns the reserved memory.

        Args:
            constants: Tensors that wait at most, tensors that always wait, and gibibytes of the libraries.
        """
        most, always, libraries = constants
        base = self.replayed + always * self.full + libraries
        return base + min(min(most, self.waiting) * self.full, max(0.0, CAPACITY / 2.0**30 - base))


#: Values that are tried for the constants of :meth:`ReplayedMemory.total`.
CONSTANTS = [*product(range(30, 67, 3), range(5), (0.0, 0.05, 0.1, 0.15, 0.2))]


@functools.cache
def replay(run: GridRun) -> ReplayedMemory:
    """Returns the reserved memory of the first rank."""
    layout, mesh, blocks = run.layout, run.layout.mesh, first_blocks(run)
    shape = Shape(*MODELS[run.model], VOCABULARY)
    count = layout.micro_batches
    step = StepLayout(mesh.pp, mesh.data_size, mesh.tp, layout.micro_batch, count, layout.zero, blocks, LENGTH)
    replayed = reserved_bytes(shape, step, CAPACITY)
    full = 2 * step.tokens * shape.width if mesh.tp > 1 else 0
    waiting = 0.0
    if mesh.pp == 1 and not run.is_after_fix:
        waiting = 2.0 * blocks * count
    elif mesh.pp > 1 and run.is_after_fix:
        is_slow = 2 * shape.block_parameters * step.tokens / mesh.tp > SLOW and mesh.tp <= NODE
        waiting = math.inf if is_slow and count > mesh.pp else 2.0 * blocks * (mesh.pp - 2)
    return ReplayedMemory(replayed / 2.0**30, full / 2.0**30, waiting)


def fit_constants(runs: Sequence[GridRun]) -> tuple[float, ...]:
    """Returns the constants with the least mean error of runs."""
    found = [(replay(run), run.measured or 1.0) for run in runs]
    return min(CONSTANTS, key=lambda values: sum(abs(one.total(values) / measured - 1) for one, measured in found))


def replay_errors(runs: Sequence[GridRun], constants: Sequence[float]) -> list[float]:
    """Returns the errors of the replay."""
    return [abs(replay(run).total(constants) / (run.measured or 1.0) - 1) for run in runs]


def fit(memories: Sequence[GridMemory], measured: Sequence[float]) -> list[float]:
    """Returns the factors, none negative, with the least sum of relative errors, by reweighted least squares."""
    from scipy.optimize import nnls

    matrix = torch.tensor([[memory.pending, 1.0] for memory in memories], dtype=torch.float64)
    target = torch.tensor(measured, dtype=torch.float64)
    rest = target - torch.tensor([memory.total((0.0, 0.0)) for memory in memories], dtype=torch.float64)
    weights = 1 / target
    for _ in range(30):
        factors = torch.from_numpy(nnls((matrix * weights[:, None]).numpy(), (rest * weights).numpy())[0])
        errors = ((matrix @ factors - rest) / target).abs().clamp_min(0.02)
        weights = 1 / target / errors.sqrt()
    return factors.tolist()


def auc(failed: Sequence[float], ran: Sequence[float]) -> float:
    """Returns the probability that a failed run's prediction is above that of one that ran."""
    return statistics.mean((a > b) + 0.5 * (a == b) for a in failed for b in ran)


def errors_of(runs: Sequence[GridRun], choice: int) -> tuple[list[float], list[float]]:
    """Returns the errors of the runs that were not calibrated on, and the factors.

    Args:
        runs: Runs that did not fail.
        choice: Number of the choice of the calibrated runs.
    """
    order = random.Random(choice).sample(range(len(runs)), len(runs))
    memories, measured = [predict(run)[0] for run in runs], [run.measured or 0.0 for run in runs]
    own, others = order[:CALIBRATED], order[CALIBRATED:]
    factors = fit([memories[n] for n in own], [measured[n] for n in own])
    return [abs(memories[n].total(factors) / measured[n] - 1) for n in others], factors


def groups_with_equal_activations(runs: Sequence[GridRun]) -> list[list[tuple[float, float]]]:
    """Returns the predicted state and the measured memory of runs, by what decides the activations."""
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for run in runs:
        layout, mesh = run.layout, run.layout.mesh
        key = run.model, mesh.pp, mesh.tp, layout.micro_batch, _rows_in_flight(layout)
        groups.setdefault(key, []).append((predict(run)[0].state, run.measured or 0.0))
    return list(groups.values())


def groups_of_equal_ranks(runs: Sequence[GridRun]) -> list[list[tuple[float, float]]]:
    """Returns zeros and the measured memory of runs without ZeRO whose ranks do the same, in groups of at least two.

    They differ in the number of data-parallel ranks, of which there is one or there are several, and of micro-batches.
    """
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for run in runs:
        layout, mesh = run.layout, run.layout.mesh
        key = run.model, mesh.pp, mesh.tp, layout.micro_batch, _rows_in_flight(layout), layout.micro_batches > 1
        if not layout.zero:
            groups.setdefault((*key, mesh.data_size > 1), []).append((0.0, run.measured or 0.0))
    return [group for group in groups.values() if len(group) > 1]


def errors_of_groups(groups: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Returns the mean errors of two guesses of what runs have beyond what is known of them.

    The first is the constant that is best for all runs of a group. The second is the median of the others of the group;
    runs without others are left out.

    Args:
        groups: Known and measured memory of each run, by group.
    """
    best, left_out = [], []
    for group in groups:
        rests = [measured - known for known, measured in group]

        def errors(rest: float, group: Sequence[tuple[float, float]] = group) -> list[float]:
            return [abs((known + rest) / measured - 1) for known, measured in group]

        # The sum of errors is linear between the rests of two runs, and so is least at one of them.
        best += min((errors(rest) for rest in rests), key=sum)
        for at in range(len(group)) if len(group) > 1 else ():
            left_out.append(errors(statistics.median(rests[:at] + rests[at + 1 :]))[at])
    return statistics.mean(best), statistics.mean(left_out)


def replay_notes(runs: Sequence[GridRun], choices: int) -> list[str]:
    """Returns the errors of the replay: of runs that were not calibrated on, and of groups that were left out.

    Args:
        runs: Runs that did not fail.
        choices: Number of choices of the calibrated runs.
    """
    means, medians, constants = [], [], []
    for choice in range(choices):
        order = random.Random(choice).sample(range(len(runs)), len(runs))
        constants.append(fit_constants([runs[n] for n in order[:CALIBRATED]]))
        errors = replay_errors([runs[n] for n in order[CALIBRATED:]], constants[-1])
        means.append(statistics.mean(errors))
        medians.append(statistics.median(errors))
    most, always, libraries = (statistics.median(values) for values in zip(*constants, strict=True))
    notes = [
        f"the allocator's replay, calibrated on {CALIBRATED} of {len(runs)} runs: mean error"
        f" {statistics.mean(means):.1%} ({min(means):.1%} to {max(means):.1%} for {choices} choices), median error"
        f" {statistics.mean(medians):.1%}; {most:.0f} tensors wait at most, {always:.0f} always, libraries take"
        f" {libraries:.2f} GiB"
    ]
    groups: tuple[tuple[str, Callable[[GridRun], object]], ...] = (
        ("model", lambda run: run.model),
        ("tp", lambda run: run.layout.mesh.tp),
        ("pp", lambda run: run.layout.mesh.pp),
        ("ZeRO", lambda run: run.layout.zero),
        ("rows", lambda run: run.layout.micro_batch),
    )
    for name, key in groups:
        listed = []
        for value in sorted({key(run) for run in runs}, key=str):
            left_out = [run for run in runs if key(run) == value]
            rest = random.Random(0).sample([run for run in runs if key(run) != value], CALIBRATED)
            error = statistics.mean(replay_errors(left_out, fit_constants(rest)))
            listed.append(f"{value}: {error:.1%} of {len(left_out)}")
        notes.append(f"calibrated on {CALIBRATED} runs of other groups, by {name}: " + ", ".join(listed))
    return notes


def main() -> None:
    """Predicts each run, and prints the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="file of the grid")
    parser.add_argument("--table", type=Path, help="published table of the grid's runs")
    parser.add_argument("--choices", type=int, default=12, help="choices of the calibrated runs")
    options = parse_options(parser, __file__)
    runs = with_causes(read_runs(options.rows, options.table))
    ran = [run for run in runs if run.measured is not None]
    record = Record.of(__file__, __doc__, options)
    table = Table("memory: predicted over reserved", "the reserved memory of the first rank", ELAPSED)
    found = [errors_of(ran, choice) for choice in range(options.choices)]
    means = [statistics.mean(errors) for errors, _ in found]
    middle = statistics.mean(statistics.median(errors) for errors, _ in found)
    factors = [statistics.median(one[at] for _, one in found) for at in range(2)]
    for model in MODELS:
        ratios = [predict(run)[0].total(factors) / (run.measured or 1.0) for run in ran if run.model == model]
        table.add(f"{model}, with the median factors", ratios, ours=True)
    table.notes += replay_notes(ran, options.choices)
    table.notes.append(
        f"dlo's model, calibrated on {CALIBRATED} of {len(ran)} runs: mean error {statistics.mean(means):.1%}"
        f" ({min(means):.1%} to {max(means):.1%} for {options.choices} choices), median error {middle:.1%}; fraction of"
        f" the gathered inputs that stay reserved {factors[0]:.2f}, constant {factors[1]:.2f} GiB"
    )
    for title, sizes in (("up to 4", (1, 2, 4)), ("of 8 and more", (8, 16, 32))):
        chosen = [run for run in ran if run.layout.mesh.tp in sizes]
        errors = [abs(predict(run)[0].total(factors) / (run.measured or 1.0) - 1) for run in chosen]
        table.notes.append(f"tp {title}, {len(chosen)} runs: mean error {statistics.mean(errors):.1%}")
    for title, groups in (
        ("groups with the same activations", groups_with_equal_activations(ran)),
        ("groups without ZeRO whose ranks do the same", groups_of_equal_ranks(ran)),
    ):
        best, left_out = errors_of_groups(groups)
        table.notes.append(
            f"{len(groups)} {title}, {sum(map(len, groups))} runs: mean error {best:.1%} with the best constant of"
            f" each, chosen in hindsight, {left_out:.1%} with the median of a run's other runs"
        )
    failed = [run for run in runs if run.measured is None]
    # Inputs that stay reserved are freed before an allocation fails.
    most = {id(run): max(memory.total((0.0, factors[1])) for memory in predict(run)) for run in runs}
    chosen_ones = [("all", failed), ("without a known cause", [run for run in failed if not run.cause])]
    if options.table:
        chosen_ones.append(("out of memory by the table's status", [run for run in failed if run.status == "OOM"]))
    for name, chosen in chosen_ones:
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
