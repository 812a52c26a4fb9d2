"""Plans the schedules of a run's chains from the surveys of all ranks, so that ranks with the same blocks agree.

A rank has one chain, or one for each of its pipeline stages. Its budget is divided among the micro-batches of the
chains that are in flight at the same time.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dlo_framework.errors import DloError
from dlo_framework.units import format_bytes, format_table, parse_bytes
from dlo_plugins.memory.offload import solve_offload
from dlo_plugins.memory.rotor import BudgetTooSmall, keep_fastest, solve, solve_alone
from dlo_plugins.memory.schedule import (
    Chain,
    Keep,
    Link,
    OperationKind,
    Recompute,
    Schedule,
    Simulation,
    Stage,
    node_costs,
    offloaded_bytes,
    predict,
    simulate,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Share of the memory that is used; fragmentation takes the rest.
_USED = 0.92


@dataclass(frozen=True)
class Budget:
    """Budget of activations.

    Attributes:
        bytes: Number of bytes; None for the others.
        share: Share of the peak of a step that keeps everything; None for the others.

    With neither, it is the memory that is left.
    """

    bytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: str | float) -> Budget:
        """Returns the budget of a config.

        Args:
            text: `12GB`, `800MiB`, a number of bytes, `60%`, or `auto`.

        Raises:
            DloError: It is none of these.
        """
        given = str(text).strip()
        if given == "auto":
            return cls()
        number, sign, rest = given.partition("%")
        try:
            if not sign:
                return cls(bytes=parse_bytes(given, "budget"))
            if not rest and 0 < float(number) <= 100:
                return cls(share=float(number) / 100)
        except ValueError as error:
            raise _malformed(text) from error
        raise _malformed(text)

    @property
    def is_auto(self) -> bool:
        """Whether it is the memory that is left."""
        return self.bytes is None and self.share is None


def _malformed(text: str | float) -> DloError:
    rule = "a size such as 12GB, a share such as 60%, or auto"
    return DloError(f"budget must be {rule}, got {text}; set one of these")


def free_memory(device: torch.device, activations: int, local_ranks: int) -> int:
    """Returns the bytes that are left for activations beside all else that a step needs.

    Args:
        device: Device of the rank. On an accelerator, its peak of allocated memory since the last reset is that of a
            full step.
        activations: Bytes of activations in that step.
        local_ranks: Number of ranks that share a CPU's memory.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return max(0, int(total * _USED) - max(0, torch.cuda.max_memory_allocated(device) - activations))
    return max(0, int(_available_host_memory() * _USED / local_ranks))


def _available_host_memory() -> int:
    """Returns the bytes of the host's memory that programs can still allocate."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        if match:
            return int(match.group(1)) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class InFlight(NamedTuple):
    """Micro-batches that a rank of a pipeline keeps for backward.

    Attributes:
        stages: Stages of the rank.
        together: Micro-batches of each stage when the rank has most of them.
        most: Largest number of each stage, at whatever time.
        inputs: Micro-batches of each stage of which it has only the input then, because it recomputes the others.
    """

    stages: tuple[int, ...] = (0,)
    together: tuple[int, ...] = (1,)
    most: tuple[int, ...] = (1,)
    inputs: tuple[int, ...] = (0,)


def replay_in_flight(schedule: Any) -> Iterator[InFlight]:
    """Yields the micro-batches in flight on each rank of a pipeline's schedule.

    A stage keeps a micro-batch's activations from its forward, or its recomputation, until its backward, or until its
    weight gradient.
    """
    from dlo_plugins.parallel.pipeline.pipeline_schedules import ActionKind

    if not schedule.flushes:
        schedule = schedule.unroll(2)
    ends = (ActionKind.BACKWARD, ActionKind.WEIGHT if schedule.splits_backward else ActionKind.BACKWARD)
    recomputed = schedule.recomputed_stages
    for rank, order in enumerate(schedule.orders):
        own = tuple(schedule.placement.stages_of(rank))
        live, most, inputs = (dict.fromkeys(own, 0) for _ in range(3))
        largest, together, with_inputs = (0, 0), live, inputs
        for action in order:
            stage, kind = action.stage, action.kind
            if kind in ends:
                live[stage] -= 1
            elif kind is ActionKind.RECOMPUTE or (kind is ActionKind.FORWARD and stage not in recomputed):
                live[stage] += 1
                most[stage] = max(most[stage], live[stage])
                inputs[stage] -= kind is ActionKind.RECOMPUTE
            elif kind is ActionKind.FORWARD:
                inputs[stage] += 1
            size = sum(live.values()), sum(inputs.values())
            if size > largest:
                together, with_inputs, largest = dict(live), dict(inputs), size
        yield InFlight(own, *(tuple(of.values()) for of in (together, most, with_inputs)))


#: Share of a budget that is left free, for what is allocated between the blocks and not measured with them.
_MARGIN = 0.005


@dataclass(frozen=True)
class MeasuredChain:
    """Chain that a rank has measured.

    Attributes:
        chain: Chain of one micro-batch.
        stem: Bytes that a micro-batch keeps before the first block, without the first block's input.
        refusal: Why the blocks cannot run as regions; empty if they can.
        in_flight: Largest number of micro-batches whose activations are kept at the same time.
        stem_backward: Peak bytes of the backward before the first block, whatever the blocks keep; 0 if not measured.
    """

    chain: Chain
    stem: int
    refusal: str = ""
    in_flight: int = 1
    stem_backward: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stages."""
        return tuple(stage.name for stage in self.chain.stages)

    @functools.cached_property
    def kept_peak(self) -> int:
        """Peak bytes of a micro-batch that keeps everything."""
        kept = self.stem + predict(self.chain, [Keep(index) for index in range(len(self.chain))]).peak
        return max(kept, self.stem_backward)


@dataclass(frozen=True)
class MeasuredRank:
    """Chains of a rank.

    Attributes:
        chains: Chain of each of its pipeline stages.
        free: Bytes that are left for their activations.
        link: Link to the host; None if nothing may be offloaded.
    """

    chains: tuple[MeasuredChain, ...]
    free: int
    link: Link | None = None


@dataclass(frozen=True)
class Plan:
    """Schedule of a measured chain.

    Attributes:
        measured: Chain, of which all ranks with the same blocks have the largest bytes.
        schedule: Schedule of one micro-batch.
        budget: Bytes for one micro-batch, with the stem.
        link: Link of the schedule's copies; None if nothing may be offloaded.
    """

    measured: MeasuredChain
    schedule: Schedule
    budget: int
    link: Link | None = None

    @property
    def peak(self) -> int:
        """Predicted peak bytes of a micro-batch, with the stem."""
        return max(self.measured.stem + self.schedule.peak, self.measured.stem_backward)

    @property
    def overhead(self) -> float:
        """Predicted time of recomputation and of waits for copies, over the time of a step that keeps everything."""
        kept = self.measured.chain.kept_time
        return self.schedule.time / kept - 1 if kept else 0.0

    def describe(self) -> str:
        """Returns a line for the log."""
        forwards = sum(self.schedule.forwards) - len(self.schedule.forwards)
        kept = self.measured.kept_peak
        text = (
            f"{len(self.measured.chain) - 1} blocks, {forwards} forwards again, predicted overhead {self.overhead:.1%};"
            f" activations {format_bytes(self.peak)} of {format_bytes(kept)}, budget {format_bytes(self.budget)}"
        )
        if self.link is not None:
            text += f"; {format_bytes(self.offloaded)} offloaded at {format_bytes(self.link.to_host)}/s"
            waited = self.schedule.waited / self.measured.chain.kept_time if self.measured.chain.kept_time else 0.0
            text += f", waits for copies {waited:.1%}"
        return f"{text}; each block by itself: {self.measured.refusal}" if self.measured.refusal else text

    @property
    def offloaded(self) -> int:
        """Bytes that a micro-batch copies to the host, and back."""
        return offloaded_bytes(self.measured.chain, self.schedule)


def plan_ranks(ranks: Sequence[MeasuredRank], budget: Budget, slots: int = 500) -> list[list[Plan]]:
    """Returns the plans of each rank's chains.

    Args:
        ranks: Chains of each rank.
        budget: Budget of a rank.
        slots: Number of slots that a budget is divided into.

    Raises:
        DloError: A chain does not fit in its budget; the message has the least budget that does.
    """
    merged: dict[tuple[str, ...], MeasuredChain] = {}
    for rank in ranks:
        for chain in rank.chains:
            merged[chain.names] = _merge(merged.get(chain.names, chain), chain)
    links = [rank.link for rank in ranks if rank.link is not None]
    link = Link(*(min(getattr(each, key) for each in links) for key in ("to_host", "to_device"))) if links else None
    budgets: dict[tuple[str, ...], int] = {}
    for rank in ranks:
        own = [merged[chain.names] for chain in rank.chains]
        for chain, share in zip(own, _divide(own, budget, rank.free), strict=True):
            budgets[chain.names] = min(share, budgets.get(chain.names, share))
    plans = {}
    for names, chain in merged.items():
        try:
            plans[names] = _plan(chain, budgets[names], slots, link)
        except BudgetTooSmall as error:
            least = max(chain.stem + error.least, chain.stem_backward)
            raise _too_small(chain, budgets[names], least, budget) from error
        if budgets[names] < chain.stem_backward:
            raise _too_small(chain, budgets[names], chain.stem_backward, budget)
    return [[plans[chain.names] for chain in rank.chains] for rank in ranks]


def _too_small(measured: MeasuredChain, size: int, least: int, budget: Budget) -> DloError:
    """Returns the error for a budget that is too small, in the form in which it was given.

    Args:
        measured: Chain that does not fit.
        size: Bytes that it has for one micro-batch.
        least: Bytes that it needs, with the stem.
        budget: Budget of the rank.
    """
    what = f"for activations of {len(measured.chain)} stages"
    if budget.share is not None:
        peak = measured.kept_peak
        fewest = math.ceil(100 * least / peak)
        fix = f"set it to {fewest}%" if fewest <= 100 else "leave Rotor out"
        return DloError(
            f"budget must be at least {fewest}% {what}, {format_bytes(least)} of {format_bytes(peak)}, got"
            f" {100 * budget.share:.3g}%; {fix}, or make the micro-batch smaller"
        )
    # In proportion: others that share the budget get more, too.
    given = budget.bytes
    needed = least if given is None else math.ceil(given * least / max(size, 1))
    if given is None:
        return DloError(
            f"budget must be at least {needed} bytes ({format_bytes(needed)}) {what}, got auto, which leaves"
            f" {format_bytes(size)}; make the micro-batch smaller, or shard more of the state"
        )
    return DloError(
        f"budget must be at least {needed} bytes ({format_bytes(needed)}) {what}, got {given} ({format_bytes(given)});"
        " raise it to that, or make the micro-batch smaller"
    )


def _divide(chains: Sequence[MeasuredChain], budget: Budget, free: int) -> list[int]:
    """Returns the bytes of one micro-batch of each chain, in proportion to what it takes if everything is kept."""
    peaks = [chain.kept_peak for chain in chains]
    total = sum(peak * chain.in_flight for peak, chain in zip(peaks, chains, strict=True))
    if budget.share is not None:
        return [int(peak * budget.share) for peak in peaks]
    available = free if budget.bytes is None else budget.bytes
    return [int(available * (peak / total)) if total else available for peak in peaks]


def _plan(measured: MeasuredChain, budget: int, slots: int, link: Link | None) -> Plan:
    chain, available = measured.chain, max(0, budget - measured.stem)

    def find(size: int) -> Plan:
        if measured.refusal:
            return Plan(measured, solve_alone(chain, size, slots), budget, link)
        schedule = solve(chain, size, slots) if link is None else solve_offload(chain, size, link, slots)
        return Plan(measured, schedule, budget, link)

    if keep_fastest(chain).peak <= available:
        return find(available)
    try:
        return find(max(0, available - int(_MARGIN * budget)))
    except DloError:  # The margin alone does not fit.
        return find(available)


def _merge(one: MeasuredChain, other: MeasuredChain) -> MeasuredChain:
    """Returns a chain with the larger bytes and times of two."""
    stages = tuple(map(_merge_stages, one.chain.stages, other.chain.stages))
    chain = Chain(stages, max(one.chain.input, other.chain.input))
    return MeasuredChain(
        chain,
        max(one.stem, other.stem),
        one.refusal or other.refusal,
        max(one.in_flight, other.in_flight),
        max(one.stem_backward, other.stem_backward),
    )


def _merge_stages(one: Stage, other: Stage) -> Stage:
    modes = tuple(
        replace(
            a, movable=a.movable and b.movable, **{key: max(getattr(a, key), getattr(b, key)) for key in _MODE_KEYS}
        )
        for a, b in zip(one.modes, other.modes, strict=True)
    )
    peak = max(one.forward_peak, other.forward_peak)
    gathered = max(one.gathered, other.gathered)
    return replace(one, output=max(one.output, other.output), modes=modes, forward_peak=peak, gathered=gathered)


_MODE_KEYS = ("saved", "forward", "backward", "forward_peak", "backward_peak")


def describe_plan(plan: Plan) -> str:
    """Returns a summary and a table with a row for each stage."""
    rows = [("stage", "forward", "forwards", "keeps", "forward ms", "backward ms")]
    for row in _rows(plan):
        rows.append(
            (
                row["stage"],
                row["kind"] + (", offloaded" if row["offloaded"] else ""),
                str(row["forwards"]),
                format_bytes(row["kept_bytes"]),
                f"{row['forward'] * 1e3:.3g}",
                f"{row['backward'] * 1e3:.3g}",
            )
        )
    return "\n".join([plan.describe(), "", *format_table(rows, left=2), ""])


def to_json(plan: Plan) -> dict[str, Any]:
    """Returns a plan as JSON's types; bytes, seconds."""
    return {
        "budget": plan.budget,
        "predicted_peak": plan.peak,
        "peak_if_all_kept": plan.measured.kept_peak,
        "predicted_seconds": plan.schedule.time,
        "predicted_overhead": plan.overhead,
        "predicted_waits": plan.schedule.waited,
        "offloaded_bytes": plan.offloaded,
        "stages": _rows(plan),
    }


def _rows(plan: Plan) -> list[dict[str, Any]]:
    chain, schedule = plan.measured.chain, plan.schedule
    rows = []
    for node in schedule.nodes:
        again = isinstance(node, Recompute)
        for index in range(node.first, node.last + 1):
            stage = chain.stages[index]
            mode = stage.modes[node.mode if isinstance(node, Keep) else 0]
            kept = mode.saved if not again else chain.input_of(index) if index == node.first else 0
            rows.append(
                {
                    "stage": stage.name,
                    "kind": "recompute" if again else mode.name,
                    "forwards": schedule.forwards[index],
                    "kept_bytes": kept,
                    "offloaded": node.offload,
                    "forward": mode.forward,
                    "backward": mode.backward,
                }
            )
    return rows


# --- picture ---

#: Colour and label of each kind of operation.
_DRAWN = {
    "forward": ("#4c78a8", "forward, nothing kept"),
    "kept": ("#72b7b2", "forward, activations kept"),
    "again": ("#f58518", "forward again"),
    "backward": ("#b279a2", "backward"),
    "copy": ("#9d755d", "copy to the host, and back"),
    "wait": ("#e45756", "wait for a copy"),
}
_COPIES = {OperationKind.OFFLOAD: "to host", OperationKind.PREFETCH: "to device"}
_KINDS = {
    **{OperationKind.RUN: "forward", OperationKind.SAVE: "kept", OperationKind.BACKWARD: "backward"},
    **dict.fromkeys(_COPIES, "copy"),
    **dict.fromkeys((OperationKind.RELEASE, OperationKind.ARRIVE), "wait"),
}


def draw_schedule(
    chain: Chain,
    schedule: Schedule,
    stem: int = 0,
    budget: int | None = None,
    link: Link | None = None,
    measured: int = 0,
) -> Figure:
    """Returns a figure of a schedule: the operations of each stage over time, and the memory over time.

    Below the stages are the copies of each direction, where there are any; below the device's memory, the host's.

    Args:
        chain: Chain that the schedule is of.
        schedule: Schedule.
        stem: Bytes that the step keeps beside the chain.
        budget: Budget in bytes, with the stem; None draws no line.
        link: Link of the schedule's copies.
        measured: Peak bytes that a step has taken; 0 draws no line.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    simulation = simulate(chain, schedule, link)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    scale, rows, kinds = 1e3, len(chain), []
    for item in simulation.operations:
        kind, row = _kind(item.operation.kind, item.operation.run), item.operation.stage
        if item.end <= item.start and kind == "wait":
            continue
        if kind == "copy":
            row = rows + (item.operation.kind is OperationKind.PREFETCH)
        kinds.append(kind)
        width = max(item.end - item.start, 1e-12) * scale
        upper.barh(row, width, left=item.start * scale, height=0.85, color=_DRAWN[kind][0])
    if schedule.transfers:
        stages = range(0, rows, -(-rows // 10))
        upper.set_yticks([*stages, rows, rows + 1], [*map(str, stages), *_COPIES.values()])
        upper.axhline(rows - 0.5, color="0.6", linewidth=0.8)
    upper.set_ylim(rows + (1.6 if schedule.transfers else -0.4), -0.6)
    upper.set_ylabel("stage")
    upper.legend(
        handles=[Patch(color=color, label=label) for kind, (color, label) in _DRAWN.items() if kind in kinds],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.2 if schedule.transfers else 1.13),
        ncols=4 if not schedule.transfers else 3,
        frameon=False,
    )
    issued = [item for item in simulation.operations if item.operation.kind not in _COPIES]
    edges = [item.start * scale for item in issued] + [simulation.time * scale]
    lower.stairs([(item.peak + stem) / 1e6 for item in issued], edges, fill=True, color="#9ecae9")
    if schedule.transfers:
        times, held = _host_bytes(chain, schedule, simulation)
        lower.step([each * scale for each in times], [each / 1e6 for each in held], where="post", label="on the host")
    if budget is not None:
        lower.axhline(budget / 1e6, color="#e45756", linestyle="--", label="budget")
    if measured:
        lower.axhline(measured / 1e6, color="#54a24b", linestyle=":", label="measured peak")
    if budget is not None or schedule.transfers:
        lower.legend(frameon=False)
    lower.set_xlabel("time of forward and backward (ms)")
    lower.set_ylabel("activations (MB)")
    return figure


def _host_bytes(chain: Chain, schedule: Schedule, simulation: Simulation) -> tuple[list[float], list[int]]:
    """Returns the seconds at which the bytes on the host change, and the bytes from then on."""
    changes = []
    for item in simulation.operations:
        if item.operation.kind in _COPIES:
            bundle = node_costs(chain, schedule.nodes[item.operation.node]).bundle
            is_stored = item.operation.kind is OperationKind.OFFLOAD
            changes.append((item.start, bundle) if is_stored else (item.end, -bundle))
    changes.sort()
    return [0.0, *(at for at, _ in changes)], [0, *itertools.accumulate(size for _, size in changes)]


def _kind(kind: OperationKind, run: int) -> str:
    if kind in (OperationKind.RUN, OperationKind.SAVE) and run > 0:
        return "again"
    return _KINDS[kind]
